"""What the contract demands of a result, looked at before anything of it is taken.

So a result that breaks it leaves nothing half done: no token, score or beam has to be taken back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import numpy as np

from scheduler_service.core.plan import ContractBroken, StepOutcome
from scheduler_service.core.request import Int32Array, Request, ScoredToken, Sequence


def check_tokens(token_ids: Int32Array, vocab_size: int) -> None:
    """Raises ContractBroken unless all sampled tokens are in the vocabulary."""
    if len(token_ids) and token_ids.view(np.uint32).max() >= vocab_size:
        raise ContractBroken("a sampled token is outside the vocabulary")


def check_row(sequence: Sequence, index: int, outcome: StepOutcome, vocab_size: int) -> None:
    """Raises ContractBroken unless row `index`, that of `sequence`, has all that it asked for."""
    request, token_id = sequence.request, int(outcome.token_ids[index])
    if not 0 <= token_id < vocab_size:
        raise ContractBroken("a sampled token is outside the vocabulary")
    params, scored = request.params, outcome.logprobs.get(index)
    if scored is None and (params.num_logprobs is not None or not params.is_streamed):
        raise ContractBroken("a row that asked for logprobs got none")
    if params.beam is not None and scored is not None:
        _check_candidates(request, scored, vocab_size)


def _check_candidates(request: Request, scored: ScoredToken, vocab_size: int) -> None:
    if len(scored.top) < request.num_candidates:
        raise ContractBroken(
            f"a beam got {len(scored.top)} candidates; asked for: {request.num_candidates}"
        )
    for token_id, logprob in scored.top:
        # Written so that NaN is refused.
        if not (0 <= token_id < vocab_size and logprob < math.inf):
            raise ContractBroken(f"a beam got the candidate {token_id} of logprob {logprob}")


def check_prompt_logprobs(
    sequence: Sequence, start: int, num_new_tokens: int, scored: Items[ScoredToken]
) -> None:
    """Raises ContractBroken unless they are those of the input tokens from `start` on.

    And unless those before `start` came with earlier results.
    """
    end = min(start + num_new_tokens, sequence.num_prompt_tokens - 1)
    positions = [token.position for token in scored]
    if positions != list(range(start + 1, end + 1)):
        raise ContractBroken(f"prompt logprobs at {positions}; asked for: {start + 1} to {end}")
    if start > sequence.request.num_prompt_logprobs_sent:
        raise ContractBroken(f"prompt logprobs before position {start + 1} never came")
