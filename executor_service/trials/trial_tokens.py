"""What a model is tried with: random tokens, from the first position on and at far ones.

Shape letters: Q sequences, L tokens of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor_service.trials.model_cut import CUT_VOCAB_SIZE

_NUM_NEAR_SEQUENCES = 2
_MIN_NEAR_TOKENS = 16
# A window up to this size is tried past its end.
_MAX_TRIED_WINDOW = 160
TOKENS_PAST_WINDOW = 16
# Tokens around a boundary, most of them from it on: a minority may differ by chance.
_NUM_FAR_TOKENS = 8
_NUM_BEFORE_BOUNDARY = 2
_MAX_NUM_BOUNDARIES = 64
_POSITIONAL = re.compile(r"position|window|chunk|length|seq|floor|scale|context|ctx")


@dataclass(frozen=True, slots=True)
class TrialTokens:
    """`tokens`: [Q, L], sequence q stands at positions `starts[q]`, [Q], and after it."""

    tokens: Tensor
    starts: Tensor

    @property
    def position_ids(self) -> Tensor:
        """[Q, L]."""
        steps = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return self.starts[:, None] + steps


def near_tokens(
    model: Any,  # noqa: ANN401
    text_config: Any,  # noqa: ANN401
    max_model_len: int,
    passed: int = 0,
) -> TrialTokens:
    """From the first position on, long enough to pass the end of a small sliding window.

    `passed`: a number of tokens that the sequences pass in any case.
    """
    length = max(_MIN_NEAR_TOKENS, passed + TOKENS_PAST_WINDOW if passed else 0)
    window = getattr(text_config, "sliding_window", None)
    if isinstance(window, int) and window <= _MAX_TRIED_WINDOW:
        length = max(length, window + TOKENS_PAST_WINDOW)
    return _random(model, text_config, min(length, max_model_len), [0] * _NUM_NEAR_SEQUENCES)


def far_tokens(model: Any, text_config: Any, max_model_len: int) -> TrialTokens:  # noqa: ANN401
    """Around each position from which on a model may compute something else.

    These are all whole numbers of its configuration, whatever their names: what a field of a later
    `transformers` compares positions with is not known. The last positions are among them.
    """
    length = min(_NUM_FAR_TOKENS, max_model_len)
    last = max_model_len - length
    numbers = dict(whole_numbers(vars(text_config)))
    # Those whose names tell come first, should there be too many.
    by_name = sorted(numbers, key=lambda number: (not _POSITIONAL.search(numbers[number]), number))
    starts = [number - _NUM_BEFORE_BOUNDARY for number in by_name]
    starts = [start for start in starts if 0 < start < last][: _MAX_NUM_BOUNDARIES - 1]
    return _random(model, text_config, length, [*starts, last])


def whole_numbers(settings: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """Numbers and a name of each, of parts of the configuration, too."""
    for name, setting in settings.items():
        if isinstance(setting, dict):
            yield from whole_numbers({str(key): each for key, each in setting.items()})
        elif isinstance(setting, (list, tuple)):
            for each in setting:
                yield from whole_numbers({name: each})
        elif isinstance(setting, (int, float)) and setting == setting // 1 and setting < 2**31:
            yield int(setting), name


def _random(
    model: Any,  # noqa: ANN401
    text_config: Any,  # noqa: ANN401
    length: int,
    starts: list[int],
) -> TrialTokens:
    vocab_size = model.get_input_embeddings().weight.shape[0]
    # Placeholder tokens (of images, say) would be replaced or counted.
    special = {
        token_id
        for config in (model.config, text_config)
        for attribute, token_id in vars(config).items()
        if attribute.endswith(("_token_id", "_token_index")) and isinstance(token_id, int)
    }
    ordinary = torch.tensor([t for t in range(min(vocab_size, CUT_VOCAB_SIZE)) if t not in special])
    chosen = torch.randint(
        len(ordinary), (len(starts), length), generator=torch.Generator().manual_seed(0)
    )
    return TrialTokens(ordinary[chosen].to(model.device), torch.tensor(starts, device=model.device))
