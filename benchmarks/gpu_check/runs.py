"""Several tokens a step: rows that run on, and guesses that are verified, beside one a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.runners import StepAt, load, pipelined_s, runner_of, step_times, steps_of
from benchmarks.gpu_check.sizes import Rows, Sizes
from benchmarks.gpu_check.steps import num_blocks_of
from executor_service.runner import ModelRunner
from executor_service.steps import MAX_NUM_DRAFTS, StepInput, TokenRuns

_LENGTHS = (1, 8)
# With what comes before it is timed, no more tokens than `steps_of` has room for.
_MOST_STEPS = 8
_NUM_DRAFTS = (0, 4, 8)


def cases(sizes: Sizes) -> Iterator[Case]:
    """Of the small model, whose steps are short: that is where the host is most of a token."""
    compute = load(sizes.small_model, sizes)
    widest: Rows = ((sizes.model_context + 200, 1),) * max(sizes.batches)
    num_blocks = num_blocks_of(widest, compute.block_size)
    is_recorded = compute.is_recordable
    # Drafts sample like rows of their own.
    most_rows = max(sizes.batches) + MAX_NUM_DRAFTS
    with runner_of(compute, num_blocks, most_rows, sizes, is_recorded=is_recorded) as runner:
        yield Case("tokens", 5, partial(_compare, runner, sizes))
        for batch in sizes.batches:
            rows: Rows = ((sizes.model_context, 1),) * batch
            for length in _LENGTHS:
                name = f"{batch} rows, {length} tokens a step"
                yield Case(name, 5, partial(_time_runs, name, runner, rows, length, sizes))
            for num_drafts in _NUM_DRAFTS:
                if batch * num_drafts > MAX_NUM_DRAFTS:
                    continue
                name = f"{batch} rows, {num_drafts} drafts each"
                yield Case(name, 5, partial(_time_drafts, name, runner, rows, num_drafts, sizes))


def _compare(runner: ModelRunner, sizes: Sizes) -> Iterator[Measurement]:
    """A run is replayed like the steps that bring one token, so its tokens are the same ones."""
    name, length = "tokens of a run are those of steps", _LENGTHS[-1]
    steps = steps_of(runner, ((sizes.model_context, 1),) * sizes.batches[0])
    run = runner.execute(_run(steps, length)(0))
    expected, token_ids = [], steps(0).token_ids
    for index in range(length):
        token_ids = runner.execute(replace(steps(index), token_ids=token_ids)).sampled_token_ids
        expected.append(token_ids)
    assert run.runs is not None, "a run says all its tokens"
    is_same = run.runs.rows == np.stack(expected, axis=1).tolist()
    how = "on the device" if runner.runs_on_alone else "by turns of the host"
    yield Measurement(name, "yes" if is_same else "no", aim="yes", is_met=is_same, note=how)


def _time_runs(
    name: str, runner: ModelRunner, rows: Rows, length: int, sizes: Sizes
) -> Iterator[Measurement]:
    num_steps = min(sizes.num_steps, _MOST_STEPS)
    seconds = pipelined_s(runner, _run(steps_of(runner, rows), length), num_steps)
    tokens_s = len(rows) * length / seconds
    yield Measurement(name, seconds / length * 1e3, "ms a token", note=f"{tokens_s:.0f} tokens/s")


def _time_drafts(
    name: str, runner: ModelRunner, rows: Rows, num_drafts: int, sizes: Sizes
) -> Iterator[Measurement]:
    """The host waits once a step, whatever is taken: what guesses cost, as prompt lookup has it."""
    step_at = _run(steps_of(runner, rows), num_drafts + 1)

    def drafted(index: int) -> StepInput:
        step = step_at(index)
        nobody_runs = np.zeros(len(rows), np.int32)
        drafts = TokenRuns.of([[7] * num_drafts] * len(rows))
        return replace(step, num_run_on_tokens=nobody_runs, drafts=drafts if num_drafts else None)

    times = step_times(runner, drafted, min(sizes.num_steps, _MOST_STEPS))
    yield Measurement(name, times.wall_s * 1e3, "ms a step")


def _run(steps: StepAt, length: int) -> StepAt:
    """Of so many tokens, each of which is a step of `steps`."""

    def step(index: int) -> StepInput:
        first, last = steps(index * length), steps((index + 1) * length - 1)
        num_more = np.full(first.num_rows, length - 1, np.int32)
        return replace(
            first,
            step_id=index + 1,
            block_tables=last.block_tables,
            num_run_on_tokens=num_more if length > 1 else None,
        )

    return step
