"""Which of several completions are returned."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

from scheduler_service.core.request import Sequence


def rank_completions(sequences: Items[Sequence], n: int) -> list[Sequence]:
    """The `n` with the highest mean logprob per output token, best first; of equals, by index.

    A stop token counts as a token. One without any comes last.
    """
    return sorted(sequences, key=lambda s: (-_mean_logprob(s), s.index))[:n]


def _mean_logprob(sequence: Sequence) -> float:
    if sequence.num_output_tokens == 0:
        return -math.inf
    return sequence.cumulative_logprob / sequence.num_output_tokens
