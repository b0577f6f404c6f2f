"""Logprobs of a runner without logits: functions of the token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from executor_service.steps.step import Int32Array, LogprobColumns, StepInput


def fake_logprob(token: int) -> float:
    """Exact in float32."""
    return -(token % 8 + 1) / 16


def fake_prompt_logprob(token: int, read: int) -> float:
    """Of a prompt token after one that reads `read`. Exact in float32."""
    return -((token ^ read) % 8 + 1) / 16


def sampled_scores(step: StepInput, tokens: Int32Array, vocab_size: int) -> LogprobColumns | None:
    """Scores of sampled tokens, for rows that ask."""
    scored = []
    ends = (step.num_computed_tokens + step.num_new_tokens).tolist()
    for row, token in enumerate(tokens.tolist()):
        num_top = step.sampling_params[row].num_logprobs
        if token >= 0 and num_top is not None:
            scored.append((row, ends[row], token, num_top, fake_logprob(token)))
    return _columns(scored, vocab_size)


def prompt_scores(
    step: StepInput, vocab_size: int, read: Callable[[int, int], int]
) -> LogprobColumns | None:
    """Scores of the prompt tokens after each input token, for rows that ask.

    `read`: what the token of a row, at a position, reads.
    """
    scored = []
    for row, history in enumerate(step.histories):
        num_top = step.sampling_params[row].num_prompt_logprobs
        if num_top is None or history is None:
            continue
        start = int(step.num_computed_tokens[row])
        end = min(start + int(step.num_new_tokens[row]), int(step.num_prompt_tokens[row]) - 1)
        for position in range(start, end):
            token = history[position + 1]
            logprob = fake_prompt_logprob(token, read(row, position))
            scored.append((row, position + 1, token, num_top, logprob))
    return _columns(scored, vocab_size)


def _columns(
    scored: Sequence[tuple[int, int, int, int, float]], vocab_size: int
) -> LogprobColumns | None:
    """`scored`: row, position, token, number of alternatives, and logprob of each."""
    if not scored:
        return None
    rows, positions, tokens, wanted, logprobs = zip(*scored, strict=True)
    num_top = [min(n, vocab_size) for n in wanted]
    each = zip(tokens, num_top, strict=True)
    top = [(token + i) % vocab_size for token, n in each for i in range(n)]
    return LogprobColumns(
        row_indexes=np.array(rows, np.int32),
        positions=np.array(positions, np.int32),
        token_ids=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
        ranks=np.ones(len(scored), np.int32),
        top_offsets=np.cumsum([0, *num_top]).astype(np.int32),
        top_token_ids=np.array(top, np.int32),
        top_logprobs=np.array([fake_logprob(token) for token in top], np.float32),
    )
