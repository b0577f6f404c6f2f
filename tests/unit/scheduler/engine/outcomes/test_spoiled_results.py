"""Nothing is taken of what a failure has spoiled, wherever its owner is by then."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from executor_service.steps.step import RowStatus as ExecutorRowStatus
from executor_service.steps.step import StepInput
from scheduler_service.scheduler.values.config import PreemptionMode
from scheduler_service.scheduler.values.plan import RowStatus, StepEvents
from scheduler_service.scheduler.values.request import FinishReason, RequestStatus, SchedulingParams
from scheduler_service.scheduler.values.sampling_params import BeamParams
from tests.support.core.checked_engine import CheckedEngine, expected_hypotheses
from tests.support.core.checks import check_rows
from tests.support.core.driver import CoreDriver
from tests.support.fakes.fake_runner import StepFault

COMMON = list(range(1, 13))
URGENT = SchedulingParams(priority=-1)
FAILED_ROW = ExecutorRowStatus.FAILED


def fault_of(step_id: int, make: Callable[[StepInput], StepFault]) -> Callable[..., StepFault]:
    """A fault in one step."""
    return lambda step: make(step) if step.step_id == step_id else StepFault()


def first_row_fails(step: StepInput) -> StepFault:
    return StepFault(rows={int(step.row_ids[0]): FAILED_ROW})


def first_row_spoils_others(step: StepInput) -> StepFault:
    return StepFault(rows={int(step.row_ids[0]): FAILED_ROW}, spoils_others=True)


def step_fails(_step: StepInput) -> StepFault:
    return StepFault(RuntimeError("asked for"))


# -- who has left its row ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
@pytest.mark.parametrize("fault", [first_row_fails, first_row_spoils_others])
def test_beams_that_yielded_find_the_same_when_a_row_they_leaned_on_fails(
    fault: Callable[[StepInput], StepFault], mode: PreemptionMode
) -> None:
    engine = CheckedEngine(
        depth=2,
        max_num_seqs=3,
        num_host_blocks=32,
        queue_policy="priority",
        preemption_mode=mode,
        fault=fault_of(1, fault),
    )
    engine.add([*COMMON, 50], "fails", max_tokens=1)
    beams = engine.add([*COMMON, 60], "beams", beam=BeamParams(2), n=2, max_tokens=9)
    engine.engine.fill()
    urgent = engine.add([70], "urgent", scheduling=URGENT, max_tokens=1)
    engine.engine.fill()
    assert (urgent.status, beams.num_preemptions) == (RequestStatus.RUNNING, 1)
    engine.drain()
    assert beams.error is None
    found = [(c.token_ids, c.score) for c in beams.completions]
    assert found == [(list(h.token_ids), h.score) for h in expected_hypotheses(beams)]


@pytest.mark.parametrize("fault", [first_row_fails, first_row_spoils_others, step_fails])
def test_sequences_that_yielded_get_their_tokens_when_what_they_leaned_on_fails(
    fault: Callable[[StepInput], StepFault],
) -> None:
    engine = CheckedEngine(depth=3, fault=fault_of(1, fault))
    engine.add([*COMMON, 50], "fails", max_tokens=1)
    request = engine.add([*COMMON, 60], n=2, max_tokens=6)
    engine.engine.depth = 2
    engine.engine.fill()
    engine.preempt(request)
    engine.drain()
    assert request.error is None
    engine.check_tokens(request)


def test_prompt_logprobs_come_once_when_chunks_in_flight_build_on_a_failed_step() -> None:
    engine = CheckedEngine(depth=2, max_num_batched_tokens=4, fault=fault_of(1, step_fails))
    request = engine.add(COMMON, num_prompt_logprobs=1, max_tokens=2)
    engine.engine.fill()
    engine.preempt(request)
    positions = [
        scored.position
        for events in answers_of(engine)
        for _, scores in events.prompt_logprobs
        for scored in scores
    ]
    assert positions == list(range(1, len(COMMON)))
    engine.check_tokens(request)


def answers_of(engine: CheckedEngine) -> list[StepEvents]:
    """What clients are told until nothing is left to do."""
    answers: list[StepEvents] = []
    while True:
        engine.engine.fill()
        if not engine.engine.in_flight:
            return answers
        answers.append(engine.answer())


def test_beam_has_no_candidates_when_it_is_to_compute_its_last_token_again() -> None:
    engine = CheckedEngine(max_num_batched_tokens=5, prefix_caching=False)
    request = engine.add(COMMON, beam=BeamParams(8), n=8, max_tokens=5)
    while not any(s.candidates for s in request.unfinished) or len(request.unfinished) < 8:
        engine.step()
    engine.preempt(request)
    while engine.core.num_in_flight or engine.core.num_waiting or engine.core.num_running:
        engine.step()
        check_rows(engine.core.placement)
    found = [c.token_ids for c in request.completions]
    assert found == [list(h.token_ids) for h in expected_hypotheses(request)]


# -- rows of one step ---------------------------------------------------------------------------


def test_row_is_computed_again_when_it_failed_for_what_it_read_of_another() -> None:
    driver = CoreDriver()
    writer = driver.add([*COMMON, 50], "writer")
    reader = driver.add([*COMMON, 60], "reader")
    driver.plan()
    statuses = [RowStatus.FAILED, RowStatus.INVALID_LOGITS]
    assert driver.answer(row_statuses=statuses, token_ids=[-1, -1]).finished == [writer]
    assert reader.error is None
    assert driver.next_rows() == [("reader", 0, 13)]


def test_rows_end_both_when_they_fail_and_share_only_what_was_there_before() -> None:
    driver = CoreDriver()
    requests = [driver.add([*COMMON, number], f"r{number}") for number in (50, 60)]
    driver.step()
    driver.plan()
    statuses = [RowStatus.FAILED, RowStatus.INVALID_LOGITS]
    driver.answer(row_statuses=statuses, token_ids=[-1, -1])
    assert [request.finish_reason for request in requests] == [FinishReason.ERROR] * 2
