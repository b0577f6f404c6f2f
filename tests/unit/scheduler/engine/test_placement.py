"""Preemption: what becomes of a request that gives up rows and blocks, and how it comes back."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.blocks.prefix_cache import NO_HIT
from scheduler_service.scheduler.values.config import PreemptionMode
from scheduler_service.scheduler.values.request import RequestStatus, SequenceStatus
from scheduler_service.scheduler.values.sampling_params import BeamParams
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import CoreDriver, names

SWAP, RECOMPUTE, AUTO = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE, PreemptionMode.AUTO


def make_driver(mode: PreemptionMode = SWAP, **options: object) -> CoreDriver:
    values = {"num_host_blocks": 8, "prefix_caching": False} | options
    return CoreDriver(preemption_mode=mode, **values)  # type: ignore[arg-type]


# -- swap or recompute -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "place"), [(SWAP, RequestStatus.SWAPPED), (RECOMPUTE, RequestStatus.PREEMPTED)]
)
def test_preempt_does_what_it_is_told_when_the_mode_is_pinned(
    mode: PreemptionMode, place: RequestStatus
) -> None:
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


def test_preempt_recomputes_when_the_row_was_placed_by_the_step_being_planned() -> None:
    # What it was given is only moved by that very step.
    driver = make_driver()
    request = driver.add(9)
    driver.core.prepare(request)
    driver.core.placement.start(request.sequence, NO_HIT)
    driver.preempt(request)
    assert request.status is RequestStatus.PREEMPTED
    assert not driver.core.placement.draft.moves


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


def test_preempt_swaps_groups_only_when_nothing_was_measured() -> None:
    driver = make_driver(AUTO)
    single, pair = driver.add(5), driver.add(5, n=2)
    driver.step()
    driver.step()
    driver.preempt(single)
    driver.preempt(pair)
    assert (single.status, pair.status) == (RequestStatus.PREEMPTED, RequestStatus.SWAPPED)


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
def test_preempted_request_waits_for_its_results_when_steps_are_in_flight(
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


def test_preempted_request_ends_when_the_result_on_its_way_is_its_last() -> None:
    driver = make_driver()
    request = driver.add(5, max_tokens=1)
    driver.plan()
    driver.preempt(request)
    driver.answer()
    assert request.is_finished
    driver.run()
    assert driver.core.num_free_host_blocks == 8
    assert driver.core.num_free_blocks == 64


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_abort_frees_both_pools_when_the_request_was_preempted(mode: PreemptionMode) -> None:
    driver = make_driver(mode)
    request = driver.add(9, "doomed", n=2)
    driver.step()
    driver.plan()
    driver.preempt(request)
    driver.core.abort("doomed")
    driver.run()
    assert driver.core.num_free_host_blocks == 8
    assert driver.core.num_free_blocks == 64
    assert (driver.core.num_swapped, driver.core.num_waiting) == (0, 0)


def test_preempted_request_comes_back_first_when_others_arrived_since() -> None:
    driver = make_driver(RECOMPUTE, max_num_seqs=1)
    old = driver.add(5, "old")
    driver.step()
    driver.add(5, "new")
    driver.preempt(old)
    assert [request.request_id for request in driver.core.queue] == ["new"]
    assert names(driver.next_rows()) == ["old"]


def test_drop_forgets_what_is_promised_when_steps_are_in_flight() -> None:
    driver = make_driver()
    sequence = driver.add(5).sequence
    driver.plan()
    driver.core.placement.drop(sequence)
    assert sequence.num_promised == 0


def test_drop_forgets_what_may_follow_when_other_beams_are_not_that_far() -> None:
    driver = make_driver()
    beam = driver.add(5, beam=BeamParams(2)).sequence
    driver.plan()
    beam.candidates = [(1, -0.5), (2, -1.5)]
    driver.core.placement.drop(beam)
    assert beam.candidates is None


def test_swapped_requests_are_ordered_by_urgency_when_the_younger_went_first() -> None:
    driver = make_driver()
    requests = [driver.add(5), driver.add(5), driver.add(5)]
    driver.step()
    for request in (requests[1], requests[2], requests[0]):
        driver.preempt(request)
    assert driver.core.placement.swapped == requests


def test_num_preemptions_counts_each_cause_when_requests_are_preempted() -> None:
    driver = make_driver()
    request = driver.add(5)
    driver.step()
    driver.preempt(request)
    driver.step()
    driver.step()
    driver.preempt(request)
    assert request.num_preemptions == driver.core.num_preemptions == 2


# -- with an executor --------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mode", PreemptionMode)
def test_requests_get_their_tokens_when_the_pool_is_too_small_for_all(
    mode: PreemptionMode, depth: int
) -> None:
    engine = CheckedEngine(
        num_device_blocks=12,
        num_host_blocks=8,
        depth=depth,
        preemption_mode=mode,
        us_per_block=5,
        us_per_token=10,
    )
    for start in range(0, 50, 10):
        engine.add(list(range(start, start + 9)), max_tokens=20)
    engine.run()
    assert engine.core.num_preemptions > 0


def test_finished_sequences_stay_finished_when_their_request_is_swapped() -> None:
    engine = CheckedEngine(num_host_blocks=16, preemption_mode=SWAP)
    request = engine.add([1, 2, 3], n=3, max_tokens=9, resume=[[4] * 8, [5], [6] * 3])
    engine.step(4)
    assert request.sequences[0].status is SequenceStatus.FINISHED
    engine.preempt(request)
    engine.drain()
    assert [sequence.num_output_tokens for sequence in request.sequences] == [9, 9, 9]
    engine.check_blocks()
