"""A lost executor: its requests go on elsewhere, from their tokens."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.sequences import Endings
from scheduler_service.scheduler.values.sampling_params import BeamParams
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import CoreDriver
from tests.support.core.pure_fleet import Broken


def test_evacuate_returns_requests_with_their_tokens_when_the_executor_is_lost() -> None:
    driver, other = CoreDriver(), CoreDriver(num_device_blocks=16)
    driver.add(3, max_tokens=6)
    driver.add(5, max_tokens=6)
    driver.step()
    driver.plan()
    moved = driver.core.evacuate()
    assert [request.sequence.num_output_tokens for request in moved] == [1, 1]
    for request in moved:
        other.core.readmit(request)
    other.run(depth=2)
    assert [request.sequence.num_output_tokens for request in moved] == [6, 6]
    assert other.core.num_free_blocks == 16


def test_evacuate_gives_tokens_back_when_the_result_that_brought_them_was_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = CoreDriver()
    preempted = [driver.add(3), driver.add(3)]
    driver.plan()
    for request in preempted:
        driver.preempt(request)
    Broken(monkeypatch, Endings, "finish_if_stopped").at_call = 2
    with pytest.raises(AssertionError):
        driver.answer(token_ids=[5, 6])
    moved = driver.core.evacuate()
    assert [request.sequence.num_output_tokens for request in moved] == [0, 0]


def test_evacuate_names_those_in_flight_when_the_executor_is_lost() -> None:
    driver = CoreDriver(max_num_seqs=2)
    for name in ("in flight", "answered", "waiting"):
        driver.add(3, name, max_tokens=1 + (name == "in flight"))
    driver.step()
    driver.add(3, "arrived")
    driver.core.abort("waiting")
    driver.plan()
    driver.add(3, "late")
    in_flight = {r.request_id: r.was_in_flight for r in driver.core.evacuate()}
    assert in_flight == {"in flight": True, "arrived": True, "late": False}


def test_evacuate_names_nobody_when_no_step_is_in_flight() -> None:
    driver = CoreDriver()
    request = driver.add(3)
    driver.plan()
    (request,) = driver.core.evacuate()
    assert request.was_in_flight
    driver = CoreDriver()
    driver.core.readmit(request)
    (request,) = driver.core.evacuate()
    assert not request.was_in_flight


def test_evacuate_forgets_what_may_follow_when_other_beams_are_not_that_far() -> None:
    driver = CoreDriver()
    beam = driver.add(3, beam=BeamParams(2)).sequence
    beam.candidates = [(1, -0.5), (2, -1.5)]
    (moved,) = driver.core.evacuate()
    assert moved.sequence.candidates is None


def test_evacuated_requests_share_nothing_wrong_when_blocks_are_larger_elsewhere() -> None:
    small, large = CheckedEngine(block_size=4), CheckedEngine(block_size=8)
    for last in (50, 60):
        small.add([1, 2, 3, 4, *range(last, last + 5)], max_tokens=8)
    small.step()
    for request in small.core.evacuate():
        large.adopt(request, small)
        large.step()
    large.run()
