from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.callers.quotas import UsageBucket

SECOND = 10**9
MINUTE = 60 * SECOND

amounts = st.integers(0, 10_000)
rates = st.sampled_from([0.5, 1.0, 7.0, 60.0, 1e6])
pauses = st.integers(0, 10 * MINUTE)


def test_bucket_holds_a_minutes_worth_when_nothing_was_used() -> None:
    bucket = UsageBucket()
    for _ in range(3):
        assert bucket.delay_s(3, MINUTE) == 0
        bucket.use(1, 3, MINUTE)
    assert bucket.delay_s(3, MINUTE) == pytest.approx(20, abs=0.01)
    assert bucket.delay_s(3, MINUTE + 10 * SECOND) == pytest.approx(10, abs=0.01)
    assert bucket.delay_s(3, MINUTE + 20 * SECOND) == 0


def test_debt_is_waited_for() -> None:
    bucket = UsageBucket()
    bucket.use(180, 60, 0)
    assert bucket.delay_s(60, 0) == pytest.approx(121, abs=0.01)
    assert bucket.delay_s(60, 0, debt=60) == pytest.approx(61, abs=0.01)
    assert bucket.delay_s(60, 0, debt=121) == 0


def test_what_was_used_counts_against_a_limit_that_changes() -> None:
    bucket = UsageBucket()
    bucket.use(10, 10, 0)
    assert bucket.delay_s(20, 0) == 0
    assert bucket.delay_s(5, 0) == pytest.approx(72, abs=0.01)


def test_one_in_two_minutes_is_let_through_when_the_limit_is_half_a_minute() -> None:
    bucket = UsageBucket()
    assert bucket.delay_s(0.5, 0) == 0
    bucket.use(1, 0.5, 0)
    assert bucket.delay_s(0.5, 0) == pytest.approx(120, abs=0.01)


@pytest.mark.parametrize("per_minute", [1e-3, 5e-324])
def test_nobody_is_told_to_wait_for_more_than_a_day(per_minute: float) -> None:
    bucket = UsageBucket()
    bucket.use(1e9, per_minute, 0)
    assert bucket.delay_s(per_minute, 0) == 86400


@given(st.lists(st.tuples(amounts, pauses), max_size=20), rates)
def test_there_is_room_after_the_delay_and_not_much_before(
    uses: list[tuple[int, int]], rate: float
) -> None:
    bucket, now_ns = UsageBucket(), 0
    for amount, pause_ns in uses:
        bucket.use(amount, rate, now_ns)
        now_ns += pause_ns
    delay_s = bucket.delay_s(rate, now_ns)
    if 0 < delay_s < 86400:
        assert bucket.delay_s(rate, now_ns + int(delay_s * SECOND)) == 0
        # What a millisecond brings, and what the sums are rounded by.
        assert bucket.delay_s(rate, now_ns + int((delay_s - 0.003) * SECOND)) > 0


@given(st.lists(st.tuples(amounts, pauses), min_size=1, max_size=20), rates)
def test_no_more_is_let_through_than_the_limit_allows(
    asked: list[tuple[int, int]], rate: float
) -> None:
    bucket, now_ns, taken = UsageBucket(), 0, [0.0]
    for amount, pause_ns in asked:
        if bucket.delay_s(rate, now_ns) == 0:
            bucket.use(amount, rate, now_ns)
            taken.append(float(amount))
        now_ns += pause_ns
    # A minute's worth at once, what time brought, and what the last one overdrew.
    assert sum(taken) <= max(rate, 1) + rate * now_ns / MINUTE + max(taken) + 1e-3
