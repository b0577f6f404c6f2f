"""A lost executor: its requests go on elsewhere, from their tokens."""

from __future__ import annotations

import pytest

from scheduler_service.core.outcomes.losses import MAX_FRUITLESS_LOSSES
from scheduler_service.core.outcomes.results import Results
from scheduler_service.core.request import FinishReason
from scheduler_service.core.sampling_params import BeamParams
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import CoreDriver
from tests.support.core.engine_loops import Broken


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
    Broken(monkeypatch, Results, "finish_if_stopped").at_call = 2
    with pytest.raises(AssertionError):
        driver.answer(token_ids=[5, 6])
    moved = driver.core.evacuate()
    assert [request.sequence.num_output_tokens for request in moved] == [0, 0]


def test_evacuate_ends_a_request_when_every_executor_dies_of_it() -> None:
    driver = CoreDriver()
    request = driver.add(3)
    for _ in range(MAX_FRUITLESS_LOSSES):
        assert request.finish_reason is None
        driver.plan()
        (request,) = driver.core.evacuate()
        driver = CoreDriver()
        driver.core.readmit(request)
    assert request.finish_reason is FinishReason.ERROR


def test_evacuate_blames_nobody_when_a_request_only_waited() -> None:
    driver = CoreDriver()
    request = driver.add(3)
    for _ in range(2 * MAX_FRUITLESS_LOSSES):
        (request,) = driver.core.evacuate()
        driver = CoreDriver()
        driver.core.readmit(request)
    assert request.finish_reason is None


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
