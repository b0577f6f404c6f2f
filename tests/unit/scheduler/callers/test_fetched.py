"""When keys are fetched: at first, now and then, and if one was missed."""

from __future__ import annotations

import logging

import pytest

from scheduler_service.callers.issuer_keys import LEAST_PAUSE_S, PERIOD_S, CannotFetch, Fetched


class Source:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_fetches = 0
        self.value = "first"
        self.problem = ""
        self.fetched = Fetched("none", self._fetch, lambda: self.now_s)

    def _fetch(self) -> str:
        self.num_fetches += 1
        if self.problem:
            raise CannotFetch(self.problem)
        return self.value

    def refresh(self, after_s: float = 0) -> bool:
        self.now_s += after_s
        return self.fetched.refresh()


@pytest.fixture
def source() -> Source:
    return Source()


def test_value_is_fetched_at_once_and_then_in_periods(source: Source) -> None:
    assert source.fetched.value == "none"
    assert (source.refresh(), source.fetched.value) == (True, "first")
    source.value = "second"
    assert [source.refresh(PERIOD_S - 1), source.refresh(1)] == [False, True]
    assert (source.fetched.value, source.num_fetches) == ("second", 2)


def test_value_stays_the_same_object_when_nothing_is_new(source: Source) -> None:
    source.refresh()
    before = source.fetched.value
    source.value = "".join(["fir", "st"])
    assert source.refresh(PERIOD_S) is False
    assert source.fetched.value is before
    assert source.num_fetches == 2


def test_value_is_fetched_sooner_when_something_was_missed_but_not_too_often(
    source: Source,
) -> None:
    source.refresh()
    for _ in range(80):
        source.fetched.want()
        source.refresh(LEAST_PAUSE_S / 80)
    assert source.num_fetches == 2
    assert source.refresh(LEAST_PAUSE_S) is False
    assert source.num_fetches == 2


def test_value_stays_and_one_line_is_logged_when_it_cannot_be_fetched(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    source.refresh()
    source.problem = "issuer: is away"
    with caplog.at_level(logging.WARNING):
        source.refresh(PERIOD_S)
        assert [source.refresh(LEAST_PAUSE_S) for _ in range(3)] == [False] * 3
    assert source.fetched.value == "first"
    assert source.num_fetches == 5
    assert caplog.messages == ["token_keys_unavailable problem='issuer: is away'"]
    source.problem, source.value = "", "second"
    assert source.refresh(LEAST_PAUSE_S) is True
