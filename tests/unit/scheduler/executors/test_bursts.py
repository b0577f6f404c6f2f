"""Tests streams while executors are replaced, lost or break the contract."""

from __future__ import annotations

import pytest

from tests.support.core import result_mutations as mutations
from tests.support.core.bursts import Burst

pytestmark = pytest.mark.cases(1)

# Runs of one case.
NUM_TOGETHER = 10
# Those that do not turn a token into another that might be true.
MUTATIONS = (
    mutations.status_of_the_step,
    mutations.status_of_a_row,
    mutations.missing_scores,
    mutations.timings,
    mutations.row_error,
    mutations.number_of_the_step,
    mutations.sampled_token_out_of_range,
)


async def run(seed: int, *, has_mutations: bool = True) -> None:
    await Burst(seed, MUTATIONS if has_mutations else ()).run()


@pytest.mark.parametrize("first", range(0, 60, NUM_TOGETHER))
async def test_streams_are_exact_when_executors_break_the_contract(first: int) -> None:
    for seed in range(first, first + NUM_TOGETHER):
        await run(seed)


@pytest.mark.parametrize("first", range(0, 20, NUM_TOGETHER))
async def test_innocent_streams_are_exact_when_some_requests_make_steps_fail(first: int) -> None:
    for seed in range(first, first + NUM_TOGETHER):
        await Burst(seed, (), guilty=5).run()


@pytest.mark.parametrize("first", range(0, 30, NUM_TOGETHER))
async def test_streams_are_exact_when_executors_are_replaced(first: int) -> None:
    for seed in range(first, first + NUM_TOGETHER):
        await run(seed, has_mutations=False)


async def test_request_begins_when_its_blocker_leaves_at_once() -> None:
    for seed in range(10):
        await Burst(seed, has_faults=False).run_with_one_that_leaves_at_once()
