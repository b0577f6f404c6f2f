"""Gaps between tokens are those of each request alone, whoever shares its steps."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.watching.metrics import TokenGaps
from splitserve_metrics.instruments import BulkValues

KEYS = range(5)
# Powers of two apart: each sum of gaps is of one set of them alone, as good as always.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)),
        st.tuples(st.just("again"), st.integers(1, 3)),
        st.tuples(st.just("ended"), st.sampled_from(KEYS)),
    ),
    max_size=30,
)
BOUNDS = tuple(float(2**exponent) for exponent in range(0, 40, 2))


class OneByOne:
    """The same by a number for each request."""

    def __init__(self) -> None:
        self.last_ns: dict[int, int] = {}
        self.gaps: list[float] = []

    def add(self, keys: list[int], now_ns: int, known: set[int]) -> list[int]:
        firsts = []
        for key, num_tokens in Counter(keys).items():
            if key in self.last_ns:
                self.gaps += [(now_ns - self.last_ns[key]) / num_tokens] * num_tokens
            elif key in known:
                firsts.append(key)
            if key in known:
                self.last_ns[key] = now_ns
        return firsts


@given(STEPS)
def test_gaps_are_those_of_each_request_alone(story: list[tuple[str, object]]) -> None:
    values, expected = BulkValues(BOUNDS, 1.0), OneByOne()
    gaps = TokenGaps(values)
    known, keys, now_ns = set(KEYS), [0], 0
    for number, (what, told) in enumerate(story):
        if what == "ended":
            assert isinstance(told, int)
            known.discard(told)
            expected.last_ns.pop(told, None)
            gaps.ended(told)
            continue
        if what == "step":
            assert isinstance(told, list)
            keys = told
        for _ in range(told if isinstance(told, int) else 1):
            now_ns += 2**number
            array = np.array(keys, np.int64)
            assert gaps.add(array, now_ns, known) == expected.add(keys, now_ns, known)
            assert gaps.num_remembered <= 2 * len(known)

    counts, total = values.totals()
    assert counts[-1] == len(expected.gaps)
    assert counts[:-1] == [sum(gap <= bound for gap in expected.gaps) for bound in BOUNDS]
    assert abs(total - sum(expected.gaps)) < 1e-6 * (1 + total)


def test_nothing_is_remembered_of_those_who_ended() -> None:
    gaps = TokenGaps(BulkValues(BOUNDS, 1.0))
    gaps.add(np.arange(4), 1, range(4))
    for key in range(4):
        gaps.ended(key)

    assert gaps.num_remembered == 0
