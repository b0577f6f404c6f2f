"""Results of steps that are not as they must be: what concerns one row, and what concerns all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from executor_service.steps.step import RowStatus
from scheduler_service.scheduler.values.plan import StepOutcome, StepPlan, StepStatus
from scheduler_service.scheduler.values.request import ScoredToken

_UNKNOWN_STATUS = 9


def is_row_ok(outcome: StepOutcome, row: int) -> bool:
    """Whether the executor says that it has computed the row."""
    is_ok = outcome.row_statuses is None or outcome.row_statuses[row] == RowStatus.OK
    return outcome.status is StepStatus.OK and is_ok


def spoil_row(outcome: StepOutcome, row: int, kind: int, vocab_size: int) -> StepOutcome:
    """`outcome` with nonsense for one row, which it says was computed; there are several kinds."""
    kinds = list(_spoiled_rows(outcome, row, vocab_size))
    return kinds[kind % len(kinds)]


def _spoiled_rows(outcome: StepOutcome, row: int, vocab_size: int) -> Iterator[StepOutcome]:
    if (scored := outcome.logprobs.get(row)) is not None:
        yield replace(outcome, logprobs={i: s for i, s in outcome.logprobs.items() if i != row})
        for wrong in _spoiled_scores(scored[-1], vocab_size):
            yield replace(outcome, logprobs={**outcome.logprobs, row: [*scored[:-1], wrong]})
        yield replace(outcome, logprobs={**outcome.logprobs, row: scored[:-1]})
    if scores := outcome.prompt_logprobs.get(row):
        for few in (scores[:-1], scores[1:], ()):
            yield replace(outcome, prompt_logprobs={**outcome.prompt_logprobs, row: few})
        wrong = replace(scores[-1], rank=0)
        some = {**outcome.prompt_logprobs, row: [*scores[:-1], wrong]}
        yield replace(outcome, prompt_logprobs=some)
    if outcome.token_counts is not None:
        yield from _spoiled_runs(outcome, row, vocab_size)
    elif outcome.token_ids[row] >= 0:
        for token_id in (vocab_size, -1, -(2**31)):
            yield replace(outcome, token_ids=_changed(outcome.token_ids, row, token_id))
    statuses = list(outcome.row_statuses or [RowStatus.OK] * len(outcome.counts))
    statuses[row] = _UNKNOWN_STATUS
    yield replace(outcome, row_statuses=statuses)


def _spoiled_runs(outcome: StepOutcome, row: int, vocab_size: int) -> Iterator[StepOutcome]:
    """Of a row that is allowed fewer than 1000 tokens."""
    assert outcome.token_counts is not None
    end = int(outcome.token_counts[: row + 1].sum())
    run = outcome.tokens_of(row)
    for tokens in ([], [*run[:-1], vocab_size], [*run[:-1], -1], [*run, *[1] * 1000]):
        start = end - len(run)
        before, after = outcome.token_ids[:start], outcome.token_ids[end:]
        yield replace(
            outcome,
            token_ids=np.concatenate([before, np.array(tokens, np.int32), after]),
            token_counts=_changed(outcome.token_counts, row, len(tokens)),
        )


def _spoiled_scores(scored: ScoredToken, vocab_size: int) -> Iterator[ScoredToken]:
    yield replace(scored, logprob=float("nan"))
    yield replace(scored, token_id=(scored.token_id + 1) % vocab_size)
    yield replace(scored, position=scored.position + 1)
    yield replace(scored, rank=0)
    if scored.top:
        yield replace(scored, top=[*scored.top[:-1], (vocab_size, -1.0)])
        yield replace(scored, top=[*scored.top, scored.top[0]])


def spoil_step(plan: StepPlan, outcome: StepOutcome, kind: int) -> StepOutcome:
    """`outcome` with nonsense that cannot be laid at any row's door; there are several kinds."""
    statuses = list(outcome.row_statuses or [RowStatus.OK] * len(outcome.counts))
    kinds = [
        replace(outcome, token_ids=np.append(outcome.token_ids, np.int32(1))),
        replace(outcome, row_statuses=[*statuses, RowStatus.OK]),
        replace(outcome, step_id=plan.step_id + 1),
    ]
    if len(outcome.token_ids):
        kinds.append(replace(outcome, token_ids=outcome.token_ids[:-1]))
    if statuses:
        kinds.append(replace(outcome, row_statuses=statuses[:-1]))
    if outcome.token_counts is not None:
        kinds.append(replace(outcome, token_counts=np.append(outcome.token_counts, np.int32(0))))
    if plan.base_step_id is None:
        kinds.append(StepOutcome(plan.step_id, StepStatus.NEED_SNAPSHOT))
    return kinds[kind % len(kinds)]


def _changed(column: np.ndarray, index: int, value: int) -> np.ndarray:
    changed = column.copy()
    changed[index] = value
    return changed
