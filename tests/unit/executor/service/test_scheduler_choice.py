from __future__ import annotations

import string
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from executor_service.service import StabilityDetector, ranked

_HOSTS = st.text(string.ascii_lowercase, min_size=1, max_size=8)
ADDRESSES = st.builds("{}:{}".format, _HOSTS, st.integers(1, 9999))


@given(st.sets(ADDRESSES, min_size=1, max_size=8), ADDRESSES, st.randoms())
def test_order_is_the_same_when_schedulers_are_told_in_another(
    schedulers: set[str], executor: str, random: object
) -> None:
    shuffled = list(schedulers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ranked(shuffled, executor) == ranked(sorted(schedulers), executor)


@given(st.sets(ADDRESSES, min_size=2, max_size=8), ADDRESSES)
def test_others_keep_their_order_when_a_scheduler_is_gone(
    schedulers: set[str], executor: str
) -> None:
    order = ranked(schedulers, executor)
    for gone in schedulers:
        assert ranked(schedulers - {gone}, executor) == [s for s in order if s != gone]


def test_executors_are_spread_evenly_when_there_are_many() -> None:
    schedulers = [f"10.0.0.{number}:50050" for number in range(4)]
    first = Counter(ranked(schedulers, f"10.1.{n // 256}.{n % 256}:50052")[0] for n in range(4000))
    assert set(first) == set(schedulers)
    assert min(first.values()) > 900  # of 1000; the standard deviation is 27
    second = Counter(ranked(schedulers, f"e{n}:1")[1] for n in range(4000))
    assert min(second.values()) > 900


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_preference_is_steady_when_it_was_the_same_for_long_enough() -> None:
    clock, holds = _Clock(), [10.0, 20.0]
    preference = StabilityDetector(lambda: holds.pop(0), clock)
    assert not preference.is_steady("a:1")
    clock.now_s = 9.9
    assert not preference.is_steady("a:1")
    clock.now_s = 10.0
    assert preference.is_steady("a:1")
    # Another one holds for its own time.
    assert not preference.is_steady("b:1")
    clock.now_s = 29.9
    assert not preference.is_steady("b:1")
    clock.now_s = 30.0
    assert preference.is_steady("b:1")


def test_preference_is_not_steady_when_it_comes_and_goes() -> None:
    clock = _Clock()
    preference = StabilityDetector(lambda: 10.0, clock)
    for second in range(100):
        clock.now_s = float(second)
        wanted = "a:1" if second % 9 else None
        assert not preference.is_steady(wanted)


def test_none_is_never_steady() -> None:
    preference = StabilityDetector(lambda: 0.0, _Clock())
    assert [preference.is_steady(None) for _ in range(2)] == [False, False]
