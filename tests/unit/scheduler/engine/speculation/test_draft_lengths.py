"""How many guesses pay, by how often they were right and by what passes take."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_service.scheduler.engine.speculation import DraftLengths, PassTimes, choose_lengths
from scheduler_service.scheduler.values import (
    BlockMoves,
    Drafts,
    RowWork,
    StepOutcome,
    StepPlan,
    StepStatus,
    TableWrites,
)

NOTHING = np.empty(0, np.int32)


def observe(
    times: PassTimes,
    num_rows: int,
    num_drafts: int,
    compute_us: int,
    interval_us: float = 0.0,
    tokens_each: int = 1,
) -> None:
    """A step of so many decodes; all drafts are those of the first row."""
    counts = np.zeros(num_rows, np.int32)
    counts[0] = num_drafts
    work = RowWork(
        row_ids=np.arange(num_rows),
        stay_ids=np.arange(num_rows),
        num_computed_tokens=np.full(num_rows, 10, np.int32),
        num_new_tokens=np.ones(num_rows, np.int32),
        sampled_steps_back=np.ones(num_rows, np.int32),
        token_ids=NOTHING,
        samples=None,
        num_run_on_tokens=None
        if tokens_each == 1
        else np.full(num_rows, tokens_each - 1, np.int32),
        drafts=Drafts(counts, np.ones(num_drafts, np.int32)) if num_drafts else None,
    )
    writes = TableWrites(NOTHING, NOTHING, NOTHING, NOTHING)
    plan = StepPlan(1, 0, [], [], writes, BlockMoves(), work)
    outcome = StepOutcome(
        1,
        StepStatus.OK,
        np.ones(num_rows * tokens_each, np.int32),
        compute_us=compute_us,
        token_counts=np.full(num_rows, tokens_each, np.int32),
    )
    times.observe(plan, outcome, interval_us)


def choose(
    times: PassTimes,
    acceptance: list[float],
    *,
    num_rows: int | None = None,
    most: int = 8,
    num_run_on: int = 0,
) -> DraftLengths | None:
    return choose_lengths(
        np.array(acceptance)[:, None] ** np.arange(1, most + 1),
        np.full(len(acceptance), most, np.int32),
        num_rows or len(acceptance),
        num_run_on,
        times,
    )


def counts_of(lengths: DraftLengths | None) -> list[int]:
    assert lengths is not None
    counts: list[int] = lengths.counts.tolist()
    return counts


def memory_bound() -> PassTimes:
    """Each token more costs a twentieth of a pass."""
    times = PassTimes()
    for num_drafts in range(9):
        observe(times, 1, num_drafts, 10_000 + 500 * num_drafts, 10_000 + 500 * num_drafts)
    return times


def test_nothing_is_drafted_until_a_pass_was_measured() -> None:
    assert choose(PassTimes(), [0.99]) is None


def test_lengths_bring_the_most_tokens_in_a_time() -> None:
    times = memory_bound()
    for ratio in (0.3, 0.5, 0.7, 0.9):
        rates = [
            sum(ratio**i for i in range(length + 1)) / (10_000 + 500 * length)
            for length in range(9)
        ]
        assert counts_of(choose(times, [ratio])) == [int(np.argmax(rates))]


def test_nothing_is_guessed_when_it_was_mostly_wrong() -> None:
    assert choose(memory_bound(), [0.04]) is None


def test_nothing_is_drafted_when_passes_cost_per_token() -> None:
    times = PassTimes()
    for num_drafts in range(9):
        observe(times, 1, num_drafts, 10_000 * (1 + num_drafts))
    assert choose(times, [0.95]) is None


def test_rows_get_drafts_by_their_own_acceptance() -> None:
    assert counts_of(choose(memory_bound(), [0.9, 0.05], num_rows=2, most=4)) == [4, 0]


def test_nothing_is_guessed_when_the_wait_between_steps_costs_more() -> None:
    times = memory_bound()
    for _ in range(30):
        observe(times, 1, 1, 10_000, 30_000)
    assert choose(times, [0.5]) is None
    assert counts_of(choose(times, [1.0])) == [8]


def test_rows_run_ahead_behind_drafts_when_steps_are_dear() -> None:
    times = PassTimes()
    for num_drafts in (0, 4, 8):
        observe(times, 1, num_drafts, 1_000, 9_000)
    lengths = choose(times, [0.8], num_run_on=7)
    assert lengths is not None
    assert lengths.runs_on
    lengths = choose(memory_bound(), [0.8], num_run_on=7)
    assert lengths is not None
    assert not lengths.runs_on


def test_time_of_a_pass_is_known_from_steps_of_several() -> None:
    times = PassTimes()
    observe(times, 2, 0, 8_000, tokens_each=4)
    passes_us = times.passes_us(np.array([2, 3]))
    assert passes_us is not None
    assert passes_us.tolist() == [2_000, 2_000]


def test_time_is_that_of_the_clock_when_executors_tell_none() -> None:
    times = PassTimes()
    observe(times, 1, 0, 0, 4_000)
    passes_us = times.passes_us(np.array([1]))
    assert passes_us is not None
    assert passes_us.tolist() == [4_000]
    assert times.overhead_us(is_drafted=False) == 0.0


def test_times_of_sizes_between_lie_between() -> None:
    times = PassTimes()
    observe(times, 1, 0, 1_000)
    observe(times, 1, 4, 2_000)
    assert times.passes_us(np.array([1, 3, 5])) == pytest.approx([1_000, 1_500, 2_000])


def test_slow_size_is_tried_again_after_long() -> None:
    times = PassTimes()
    observe(times, 1, 0, 1_000)
    observe(times, 1, 1, 2_000)
    slow = times.passes_us(np.array([2]))
    for _ in range(300):
        observe(times, 1, 0, 1_000)
    fast = times.passes_us(np.array([2]))
    assert slow is not None
    assert fast is not None
    assert (slow[0], fast[0]) == (2_000, 1_000)
