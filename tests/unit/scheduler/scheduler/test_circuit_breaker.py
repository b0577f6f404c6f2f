"""Whom failures are laid on, and when a breaker opens and closes, on a clock of its own."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.circuit_breaker import (
    FIRST_PROBE_NS,
    LAST_PROBE_NS,
    MAX_BLAME,
    MAX_FAILURES_IN_A_ROW,
    CircuitBreakers,
)

SICK, WELL = ("sick:1", 1), ("well:1", 1)


def blame(breakers: CircuitBreakers, *request_ids: str) -> None:
    """One failed step of these on the sick one, which the other computes."""
    breakers.failed(SICK, request_ids)
    breakers.succeeded(WELL, request_ids)


def test_breaker_opens_when_enough_failed_requests_succeed_elsewhere() -> None:
    breakers = CircuitBreakers()

    for number in range(int(MAX_BLAME) - 1):
        blame(breakers, f"r{number}")
    assert breakers.to_open == []
    blame(breakers, "last")

    assert breakers.to_open == [SICK]


def test_breaker_stays_closed_when_one_request_of_each_failed_step_is_guilty() -> None:
    breakers = CircuitBreakers()

    for number in range(20):
        breakers.failed(SICK, [f"innocent{number}", f"guilty{number}"])
        breakers.succeeded(WELL, [f"innocent{number}"])
        breakers.ended(f"guilty{number}")

    assert breakers.to_open == []


def test_breaker_stays_closed_when_the_same_request_fails_again_and_again() -> None:
    breakers = CircuitBreakers()

    for _ in range(20):
        blame(breakers, "r1")

    assert breakers.to_open == []


@pytest.mark.parametrize(("period", "opens"), [(2, True), (5, True), (20, False)])
def test_breaker_opens_when_more_than_a_tenth_of_steps_fail(period: int, *, opens: bool) -> None:
    breakers = CircuitBreakers()

    for number in range(200):
        if number % period:
            breakers.succeeded(SICK, [f"other{number}"])
        else:
            blame(breakers, f"r{number}")

    assert (breakers.to_open == [SICK]) is opens


def test_executor_is_suspected_when_several_requests_fail_in_a_row() -> None:
    breakers = CircuitBreakers()

    for _ in range(10):
        breakers.failed(SICK, ["r0"])
    assert not breakers.is_suspected(SICK)
    for number in range(1, MAX_FAILURES_IN_A_ROW):
        breakers.failed(SICK, [f"r{number}"])
    assert breakers.is_suspected(SICK)
    breakers.succeeded(SICK, ["another"])

    assert not breakers.is_suspected(SICK)


def test_probes_come_later_each_time_when_they_fail() -> None:
    breakers = CircuitBreakers()
    now_ns, waits = 0, []

    breakers.open(SICK, now_ns)
    for _ in range(9):
        waits.append(breakers.probe_at_ns(SICK) - now_ns)
        now_ns = breakers.probe_at_ns(SICK)
        breakers.probe_failed(SICK, now_ns)

    assert waits[:4] == [FIRST_PROBE_NS * factor for factor in (1, 2, 4, 8)]
    assert waits[-1] == LAST_PROBE_NS
    assert breakers.is_open(SICK)


def test_breaker_waits_longer_when_it_opens_again_soon() -> None:
    breakers = CircuitBreakers()
    breakers.open(SICK, 0)
    breakers.probe_passed(SICK, FIRST_PROBE_NS)
    assert not breakers.is_open(SICK)

    breakers.open(SICK, 2 * FIRST_PROBE_NS)
    assert breakers.probe_at_ns(SICK) == 4 * FIRST_PROBE_NS
    breakers.probe_passed(SICK, 4 * FIRST_PROBE_NS)
    breakers.open(SICK, 10**15)

    assert breakers.probe_at_ns(SICK) == 10**15 + FIRST_PROBE_NS


def test_nothing_is_remembered_of_requests_when_all_have_ended() -> None:
    breakers = CircuitBreakers()

    breakers.failed(SICK, ["r1", "r2"])
    assert not breakers.is_quiet(WELL)
    breakers.succeeded(WELL, ["r1"])
    breakers.ended("r2")

    assert breakers.is_quiet(WELL)
    assert breakers.failed_at("r1") == breakers.failed_at("r2") == ()
