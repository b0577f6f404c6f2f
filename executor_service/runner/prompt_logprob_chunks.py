"""A step that scores many prompt tokens, run in parts: together their logits may not fit.

It is as if its tokens had come in several steps. Shape letters: R rows of the step, K rows of a
part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from executor_service.steps.step import (
    BoolArray,
    Int64Array,
    LogprobColumns,
    RowStatus,
    StepInput,
    StepOutput,
)
from executor_service.steps.step_parts import join_columns, part_of

# Prompt tokens whose logits there are at a time; with 150 000 tokens in the vocabulary, 150 MB.
MAX_SCORED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _Part:
    """Of rows `rows` of a step, the new tokens `starts` .. `ends` - 1; [K] each."""

    rows: Int64Array
    starts: Int64Array
    ends: Int64Array


def scores_too_much(step: StepInput) -> bool:
    """Whether `step` is to be run in parts."""
    if len(step.token_ids) <= MAX_SCORED_TOKENS or step.cross is not None:
        return False
    return int(_num_scored(step).sum()) > MAX_SCORED_TOKENS


def run_in_parts(step: StepInput, execute: Callable[[StepInput], StepOutput]) -> StepOutput:
    """What `execute` would return for `step`, with at most MAX_SCORED_TOKENS scored at a time.

    A row of which a part fails has failed.
    """
    parts = list(_cut(step, _num_scored(step)))
    outputs = [execute(_take(step, part, is_first=part is parts[0])) for part in parts]
    return _merge(step, parts, outputs)


def _num_scored(step: StepInput) -> Int64Array:
    """[R]; they are the first new tokens of a row."""
    num_left = step.num_prompt_tokens.astype(np.int64) - 1 - step.num_computed_tokens
    num_left[step.sampling_params.num_prompt_logprobs < 0] = 0
    return np.asarray(np.clip(num_left, 0, step.num_new_tokens))


def _cut(step: StepInput, num_scored: Int64Array) -> Iterator[_Part]:
    pieces: list[tuple[int, int, int]] = []
    room = MAX_SCORED_TOKENS
    # A row may read what another row of this step writes. The writer's position then lies before
    # the reader's first input token, so in this order writers come first.
    for row in np.argsort(step.num_computed_tokens, kind="stable").tolist():
        start = 0
        while num_scored[row] - start > room:
            if room:
                pieces.append((row, start, start + room))
                start += room
            yield _part(pieces)
            pieces, room = [], MAX_SCORED_TOKENS
        pieces.append((row, start, int(step.num_new_tokens[row])))
        room -= max(0, int(num_scored[row]) - start)
    yield _part(pieces)


def _part(pieces: list[tuple[int, int, int]]) -> _Part:
    rows, starts, ends = np.array(sorted(pieces), dtype=np.int64).T
    return _Part(rows, starts, ends)


def _take(step: StepInput, part: _Part, *, is_first: bool) -> StepInput:
    """The step that computes `part`; the first one has the block moves."""
    rows = part.rows
    first_tokens = np.cumsum(step.num_new_tokens, dtype=np.int64) - step.num_new_tokens
    spans = zip(first_tokens[rows] + part.starts, first_tokens[rows] + part.ends, strict=True)
    taken = part_of(
        step,
        rows,
        num_computed_tokens=(step.num_computed_tokens[rows] + part.starts).astype(np.int32),
        num_new_tokens=(part.ends - part.starts).astype(np.int32),
        token_ids=np.concatenate([step.token_ids[start:end] for start, end in spans]),
        samples=step.samples[rows] & (part.ends == step.num_new_tokens[rows]),
    )
    if not is_first:
        return taken
    return replace(taken, swap_out=step.swap_out, swap_in=step.swap_in, copy=step.copy)


def _merge(step: StepInput, parts: list[_Part], outputs: list[StepOutput]) -> StepOutput:
    statuses = np.full(step.num_rows, RowStatus.OK, np.uint8)
    token_ids = np.full(step.num_rows, -1, np.int32)
    errors: dict[int, str] = {}
    for part, output in zip(parts, outputs, strict=True):
        has_failed = output.row_statuses != RowStatus.OK
        statuses[part.rows[has_failed]] = output.row_statuses[has_failed]
        # What a row samples comes in its last part.
        token_ids[part.rows] = output.sampled_token_ids
        errors |= {int(part.rows[row]): text for row, text in output.row_errors.items()}
    is_ok: BoolArray = statuses == RowStatus.OK
    token_ids[~is_ok] = -1
    is_computed: BoolArray = is_ok | (statuses == RowStatus.NOT_SAMPLED)
    return StepOutput(
        row_statuses=statuses,
        sampled_token_ids=token_ids,
        row_errors=errors,
        logprobs=_join(parts, [output.logprobs for output in outputs], is_ok),
        prompt_logprobs=_join(parts, [output.prompt_logprobs for output in outputs], is_computed),
        move_us=sum(output.move_us for output in outputs),
        forward_us=sum(output.forward_us for output in outputs),
        sample_us=sum(output.sample_us for output in outputs),
    )


def _join(
    parts: list[_Part], columns: list[LogprobColumns | None], is_ok: BoolArray
) -> LogprobColumns | None:
    """All `columns`, with the rows of the step, without those that failed."""
    of_step = [
        replace(of_part, row_indexes=part.rows[of_part.row_indexes].astype(np.int32))
        for part, of_part in zip(parts, columns, strict=True)
        if of_part is not None
    ]
    return join_columns(of_step, is_ok)
