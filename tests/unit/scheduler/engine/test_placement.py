"""Preemption: swap or recompute, what is kept, and sequences that share the KV of an ended one."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.scheduler.engine import (
    ASSUMED_HOST_LINK_BYTES_PER_S,
    PreemptionCosts,
    StepLoad,
    StepTimeModel,
)
from scheduler_service.scheduler.values import (
    BeamParams,
    PreemptionMode,
    RequestStatus,
    SchedulingParams,
    SequenceStatus,
    StepStatus,
)
from tests.support.core.driver import EOS, CoreDriver, growing_rows, make_config
from tests.support.core.in_process import CheckedEngine

SWAP, RECOMPUTE, AUTO = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE, PreemptionMode.AUTO


def make_driver(mode: PreemptionMode = SWAP, **options: object) -> CoreDriver:
    values = {"num_host_blocks": 8, "prefix_caching": False} | options
    return CoreDriver(preemption_mode=mode, **values)  # type: ignore[arg-type]


# -- swap or recompute -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "place"), [(SWAP, RequestStatus.SWAPPED), (RECOMPUTE, RequestStatus.PREEMPTED)]
)
def test_preempt_obeys_a_pinned_mode(mode: PreemptionMode, place: RequestStatus) -> None:
    driver = make_driver(mode)
    request = driver.add(9)
    driver.step()
    driver.preempt(request)
    assert request.status is place
    assert driver.core.num_free_blocks == 64


def test_preempt_recomputes_when_the_host_pool_is_full() -> None:
    driver = make_driver(num_host_blocks=2)
    request = driver.add(9)
    driver.step()
    driver.preempt(request)
    assert request.status is RequestStatus.PREEMPTED
    assert driver.next_rows() == [("r1", 0, 10)]


@pytest.mark.parametrize(
    ("us_per_block", "place"), [(10, RequestStatus.SWAPPED), (90, RequestStatus.PREEMPTED)]
)
def test_preempt_does_what_is_cheaper_when_both_were_measured(
    us_per_block: int, place: RequestStatus
) -> None:
    driver = make_driver(AUTO)
    pair = driver.add(20, "measured", n=2)
    driver.plan()
    driver.answer(compute_us=20 * 10)
    driver.step()
    # As long as no move was measured, several sequences are swapped out.
    driver.preempt(pair)
    out = driver.plan()
    assert out
    driver.answer(move_us=len(out.moves) * us_per_block)
    driver.core.abort("measured")
    request = driver.add(9)
    driver.step()
    # 3 blocks out and back against 9 tokens of 10 us; 9 decoded tokens are few.
    driver.preempt(request)
    assert request.status is place


# -- what is kept ------------------------------------------------------------------------------


def test_preempt_keeps_computed_tokens_when_swapped() -> None:
    driver = make_driver()
    request = driver.add(9)
    driver.step()
    driver.preempt(request)
    plan = driver.plan()  # Out, and nothing to compute.
    assert plan
    assert len(plan.moves.swap_out) == 3
    driver.answer()
    plan = driver.plan()
    assert plan
    assert len(plan.moves.swap_in) == 3
    assert driver.rows_of(plan) == [("r1", 9, 1)]


@pytest.mark.parametrize("mode", PreemptionMode)
def test_preempt_keeps_promised_tokens_when_steps_are_in_flight(mode: PreemptionMode) -> None:
    driver = make_driver(mode)
    request = driver.add(5, max_tokens=8)
    driver.plan()
    driver.plan()
    driver.preempt(request)
    assert driver.plan() is None or request.status is RequestStatus.SWAPPED
    while driver.in_flight:
        driver.answer()
    assert (request.sequence.num_output_tokens, request.sequence.num_promised) == (2, 0)
    driver.run(depth=2)
    assert request.sequence.num_output_tokens == 8


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_preempted_request_waits_for_results_in_flight(
    mode: PreemptionMode,
) -> None:
    driver = make_driver(mode)
    request = driver.add(5)
    driver.plan()
    driver.preempt(request)
    while driver.plan() is not None:
        assert driver.core.num_running == 0
    driver.answer()
    driver.plan()
    while driver.core.num_running == 0:
        driver.answer()
        driver.plan()
    assert request.status is RequestStatus.RUNNING


def test_drop_forgets_candidates_of_a_beam() -> None:
    driver = make_driver()
    beam = driver.add(5, beam=BeamParams(2)).sequence
    driver.plan()
    beam.candidates = [(1, -0.5), (2, -1.5)]
    driver.core.placement.drop(beam)
    assert beam.candidates is None


def test_swapped_requests_are_ordered_by_urgency() -> None:
    driver = make_driver()
    requests = [driver.add(5), driver.add(5), driver.add(5)]
    driver.step()
    for request in (requests[1], requests[2], requests[0]):
        driver.preempt(request)
    assert driver.core.placement.swapped == requests


def make_costs(
    mode: PreemptionMode = PreemptionMode.AUTO,
    *,
    block_bytes: int = 0,
    us_per_token: float | None = None,
) -> PreemptionCosts:
    """`us_per_token`: what prompts were found to take; None if none was measured."""
    times = StepTimeModel()
    if us_per_token is not None:
        times.learn(StepLoad(0, 100), 100 * us_per_token)
    return PreemptionCosts(make_config(preemption_mode=mode, block_bytes=block_bytes), times)


def observe_prefill(costs: PreemptionCosts, took_us: int) -> None:
    costs.observe(num_moves=0, move_us=0, num_rows=1, num_tokens=100, compute_us=took_us)


def observe_moves(costs: PreemptionCosts, us_per_block: int) -> None:
    costs.observe(num_moves=4, move_us=4 * us_per_block, num_rows=1, num_tokens=1, compute_us=0)


def prefers_swap(costs: PreemptionCosts, num_blocks: int = 10, num_tokens: int = 40) -> bool:
    return costs.prefers_swap(num_blocks=num_blocks, num_tokens=num_tokens, num_sequences=1)


@pytest.mark.parametrize(
    ("mode", "swaps"), [(PreemptionMode.SWAP, True), (PreemptionMode.RECOMPUTE, False)]
)
def test_prefers_swap_obeys_when_the_mode_is_pinned(mode: PreemptionMode, swaps: bool) -> None:
    costs = make_costs(mode, us_per_token=1 if swaps else 1000)
    observe_moves(costs, us_per_block=1000 if swaps else 1)
    assert prefers_swap(costs) is swaps


@pytest.mark.parametrize(("num_sequences", "swaps"), [(1, False), (2, True)])
def test_prefers_swap_for_groups_when_nothing_is_measured(num_sequences: int, swaps: bool) -> None:
    costs = make_costs()
    preference = costs.prefers_swap(num_blocks=1, num_tokens=9, num_sequences=num_sequences)
    assert preference is swaps


@pytest.mark.parametrize(("us_per_block", "swaps"), [(18, True), (22, False)])
def test_prefers_swap_when_two_moves_cost_less_than_computing(
    us_per_block: int, swaps: bool
) -> None:
    costs = make_costs(us_per_token=10)
    observe_moves(costs, us_per_block=us_per_block)
    # 2 x 10 blocks against 40 tokens of 10 us.
    assert prefers_swap(costs) is swaps


def test_prefers_swap_assumes_a_link_when_only_computing_was_measured() -> None:
    costs = make_costs(block_bytes=int(ASSUMED_HOST_LINK_BYTES_PER_S / 1e6) * 18, us_per_token=10)
    assert prefers_swap(costs)
    assert not prefers_swap(costs, num_tokens=34)


def test_prefers_swap_follows_the_newest_when_measurements_change() -> None:
    costs = make_costs(us_per_token=10)
    observe_moves(costs, us_per_block=5)
    for _ in range(40):
        observe_moves(costs, us_per_block=500)
    assert not prefers_swap(costs)


def test_observe_learns_nothing_of_prefills_when_a_step_only_decodes() -> None:
    costs = make_costs()
    observe_moves(costs, us_per_block=1)
    costs.observe(num_moves=0, move_us=0, num_rows=64, num_tokens=64, compute_us=9000)
    assert costs.prefill_us == 0
    assert not prefers_swap(costs)


def test_observe_keeps_the_last_prefill_time_during_decodes() -> None:
    costs = make_costs()
    observe_prefill(costs, took_us=300)
    costs.observe(num_moves=0, move_us=0, num_rows=8, num_tokens=8, compute_us=50)
    assert costs.prefill_us == 300


SHARED_PROMPT = list(range(1, 14))
UNCACHED = SchedulingParams(uses_prefix_cache=False)


@pytest.mark.parametrize("length", [11, 12, 13])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("params", [{"n": 4}, {"best_of": 4}])
def test_prompt_is_computed_once_when_all_sequences_end_early(
    params: dict[str, Any], depth: int, length: int
) -> None:
    engine = CheckedEngine(depth=depth, prefix_caching=False)
    engine.add(SHARED_PROMPT[:length], max_tokens=1, **params)
    engine.engine.fill()
    num_tokens = 0
    while engine.engine.in_flight:
        num_tokens += engine.engine.in_flight[0][0].num_tokens
        engine.answer()
        engine.engine.fill()
    # Each of the others computes the last token of the prompt.
    assert num_tokens == length + 3
    engine.run()


def test_siblings_keep_their_rows_when_the_first_ends() -> None:
    driver = CoreDriver(max_num_seqs=2)
    driver.add(SHARED_PROMPT, "several", n=2)
    driver.add([50, 51], "next")
    driver.plan()
    driver.answer(token_ids=[EOS])
    assert driver.next_rows() == [("several", 12, 1), ("next", 0, 2)]


def test_sibling_goes_on_from_its_resumed_tokens() -> None:
    driver = CoreDriver(prefix_caching=False)
    driver.add(SHARED_PROMPT, n=2, resume=[[20], [30, 31]])
    assert driver.next_rows() == [("r1", 0, 14)]
    driver.answer(token_ids=[EOS])
    assert driver.next_rows() == [("r1", 13, 2)]


def test_sibling_recomputes_a_prompt_behind_the_window() -> None:
    driver = CoreDriver(block_size=2, sliding_window=4, prefix_caching=False)
    request = driver.add(SHARED_PROMPT, n=2)
    driver.step()
    assert driver.next_rows() == [("r1", 6, 7)]
    growing_rows(driver).grow()
    driver.answer(token_ids=[EOS])
    assert request.sequences[1].status is SequenceStatus.WAITING
    assert driver.next_rows() == [("r1", 0, 6)]


def test_sibling_is_recomputed_when_its_source_was_not_written() -> None:
    driver = CoreDriver(num_device_blocks=5, prefix_caching=False)
    driver.add(8, "short", max_tokens=1)
    request = driver.add(6, "several", n=2, stop_token_ids=frozenset({42}))
    driver.add(4, "other", max_tokens=1)
    assert len(driver.next_rows()) == 3
    # The second sequence finds no block until the first step is answered.
    assert [driver.next_rows() for _ in range(2)] == [[("several", 6, 1)], [("several", 7, 1)]]
    driver.answer()
    driver.answer(token_ids=[42])
    assert request.sequences[1].status is SequenceStatus.RUNNING
    driver.answer(StepStatus.FAILED)
    assert driver.next_rows() == [("several", 0, 6)]
