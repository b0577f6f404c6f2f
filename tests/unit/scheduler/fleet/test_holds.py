"""Requests that wait for a busy executor that has their prefix."""

from __future__ import annotations

from scheduler_service.core.request import Request
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.fleet.holds import MAX_PASSED, Holds


def a_request(name: str) -> Request:
    return Request.create(name, [1, 2], SamplingParams(), arrival=1, seed=1)


def test_nobody_waits_longer_than_what_that_may_save() -> None:
    holds, request = Holds(), a_request("a")
    assert holds.begins(request, 1000.0, 100.0, now_ns=50)
    assert holds.next_end_ns == 950
    assert holds.begins(request, 1000.0, 100.0, now_ns=949)
    assert not holds.begins(request, 1000.0, 100.0, now_ns=950)
    assert holds.next_end_ns is None
    # It is not held again, though it would save something still.
    assert not holds.begins(request, 1000.0, 100.0, now_ns=951)


def test_the_end_of_its_time_is_told_once_when_nobody_can_begin_it_then() -> None:
    holds, request = Holds(), a_request("a")
    holds.begins(request, 1000.0, 100.0, now_ns=0)
    holds.end(899)
    assert holds.next_end_ns == 900
    holds.end(900)
    assert holds.next_end_ns is None
    assert not holds.begins(request, 1000.0, 100.0, now_ns=950)


def test_the_first_end_is_told_of_several() -> None:
    holds = Holds()
    holds.begins(a_request("long"), 1000.0, 100.0, now_ns=0)
    holds.begins(a_request("short"), 200.0, 100.0, now_ns=0)
    assert holds.next_end_ns == 100
    holds.forget("short")
    assert holds.next_end_ns == 900


def test_nobody_is_passed_by_more_than_a_few() -> None:
    holds, request = Holds(), a_request("a")
    assert holds.begins(request, 1000.0, 100.0, now_ns=0)
    for _ in range(MAX_PASSED):
        assert holds.may_be_passed([request])
        holds.passed([request])
    assert not holds.may_be_passed([request])
    assert not holds.begins(request, 1000.0, 100.0, now_ns=1)


def test_little_is_not_waited_for() -> None:
    assert not Holds().begins(a_request("a"), 1000.0, 900.0, now_ns=0)
