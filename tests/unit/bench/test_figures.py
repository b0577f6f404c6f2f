"""Histograms, parts and intervals, compared with numpy."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.figures import (
    RELATIVE_ERROR,
    LogHistogram,
    Parts,
    estimate,
    estimate_ratios,
    merged,
    parse_seconds,
    seconds_text,
)

SECONDS = st.floats(1e-6, 80_000, allow_nan=False)
VALUES = st.lists(SECONDS, min_size=1, max_size=200)


def histogram_of(values: list[float]) -> LogHistogram:
    histogram = LogHistogram()
    for value in values:
        histogram.record(value)
    return histogram


@given(VALUES, st.floats(0, 1))
def test_quantile_is_that_of_the_sorted_values(values: list[float], ratio: float) -> None:
    exact = float(np.quantile(values, ratio, method="inverted_cdf"))

    assert histogram_of(values).quantile(ratio) == pytest.approx(exact, rel=1.01 * RELATIVE_ERROR)


@given(VALUES)
def test_mean_and_extremes_are_exact(values: list[float]) -> None:
    histogram = histogram_of(values)

    assert histogram.mean == pytest.approx(math.fsum(values) / len(values))
    assert (histogram.smallest, histogram.largest) == (min(values), max(values))
    assert histogram.quantile(1) == pytest.approx(max(values), rel=1.01 * RELATIVE_ERROR)


@given(VALUES, VALUES)
def test_merged_histograms_are_that_of_all_values(one: list[float], other: list[float]) -> None:
    both = merged([histogram_of(one), histogram_of(other)])

    assert both.counts == histogram_of(one + other).counts
    assert both.num_values == len(one) + len(other)


@given(VALUES)
def test_histogram_is_itself_after_it_was_json(values: list[float]) -> None:
    histogram = histogram_of(values)

    assert LogHistogram.from_json(json.loads(json.dumps(histogram.as_json()))) == histogram


@given(st.lists(st.tuples(SECONDS, st.integers(1, 9)), min_size=1, max_size=50))
def test_weight_counts_as_so_many_values(weighted: list[tuple[float, int]]) -> None:
    histogram = LogHistogram()
    for value, weight in weighted:
        histogram.record(value, weight)

    each = histogram_of([value for value, weight in weighted for _ in range(weight)])
    assert histogram.counts == each.counts
    assert histogram.mean == pytest.approx(each.mean)


def test_values_beyond_the_classes_are_in_the_last_ones() -> None:
    histogram = histogram_of([-1.0, 0.0, 1e9])

    assert (histogram.smallest, histogram.largest) == (0, 1e9)
    assert len(histogram.counts) == 2


@given(st.integers(1, 1000))
def test_parts_are_bounded_and_keep_every_value_in_order(number: int) -> None:
    parts = Parts(("ttft", "gap"))
    for value in range(1, number + 1):
        parts.add([("ttft", float(value), 1.0), ("gap", 0.5, 2.0)])

    kept = parts.of("ttft")
    filled = [part for part in kept if part.num_values]
    assert len(kept) < 64
    assert len(filled) >= min(number, 32)
    assert sum(part.num_values for part in kept) == number
    assert sum(part.num_values for part in parts.of("gap")) == 2 * number
    # Consecutive: no part reaches into another. All but the last are of one size.
    bounds = [(part.smallest, part.largest) for part in filled]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(bounds))
    assert len({part.num_values for part in filled[:-1]}) <= 1


@pytest.mark.parametrize(
    ("num_requests", "ratios", "num_runs", "least"),
    # The mean of twelve values is far from normal.
    [(300, [0.5, 0.9], 100, [88, 88, 88]), (12, [0.5], 150, [0, 135])],
)
def test_interval_holds_the_truth_as_often_as_it_says(
    num_requests: int, ratios: list[float], num_runs: int, least: list[int]
) -> None:
    """Of an exponential distribution: the mean, and quantiles; 95 % should."""
    rng = np.random.default_rng(5)
    truth = [1.0, *(-math.log(1 - ratio) for ratio in ratios)]
    held = np.zeros(len(truth))
    for _ in range(num_runs):
        parts = Parts(("ttft",))
        for value in rng.exponential(1.0, num_requests):
            parts.add([("ttft", float(value), 1.0)])
        for column, figure in enumerate(estimate(parts.of("ttft"), ratios)):
            assert figure.low is not None
            assert figure.high is not None
            held[column] += figure.low <= truth[column] <= figure.high

    assert np.all(held >= least), held


def test_interval_is_not_narrower_with_repeated_values() -> None:
    """A hundred times the tokens of the same requests tell hardly more than the requests do."""
    rng = np.random.default_rng(6)
    paces = rng.lognormal(0, 0.5, 300)
    alone, together = Parts(("itl",)), Parts(("itl",))
    for pace in map(float, paces):
        alone.add([("itl", pace, 1.0)])
        together.add([("itl", pace, 100.0)])

    few, many = (estimate(parts.of("itl"), [0.5])[1] for parts in (alone, together))

    assert many.low == pytest.approx(few.low)
    assert many.high == pytest.approx(few.high)


def test_tail_that_was_not_seen_has_no_interval() -> None:
    parts = Parts(("ttft",))
    for value in np.random.default_rng(8).permutation(np.arange(1, 201)):
        parts.add([("ttft", float(value), 1.0)])

    mean, median, p95, p99 = estimate(parts.of("ttft"), [0.5, 0.95, 0.99])

    assert None not in (mean.low, median.low, p95.low)
    assert (p99.low, p99.high) == (None, None)
    assert p99.value == pytest.approx(198, rel=0.002)


def test_tail_of_one_stretch_of_a_run_has_no_interval() -> None:
    """Ten values beyond p95, all of them of one bad moment: there may be one more, or none."""
    parts = Parts(("ttft",))
    for number in range(200):
        parts.add([("ttft", 9.0 if 100 <= number < 111 else 1.0 + number % 7, 1.0)])

    _, median, p95 = estimate(parts.of("ttft"), [0.5, 0.95])

    assert median.low is not None
    assert p95.value == pytest.approx(9.0, rel=0.002)
    assert p95.low is None


def test_few_requests_have_no_interval_however_many_tokens_they_have() -> None:
    rng = np.random.default_rng(9)
    for num_requests, is_told in ((2, False), (9, False), (10, True)):
        parts = Parts(("itl",))
        for pace in rng.lognormal(0, 0.5, num_requests):
            parts.add([("itl", float(pace * value), 1.0) for value in rng.exponential(1, 100)])
        mean, median, p90 = estimate(parts.of("itl"), [0.5, 0.9])
        assert [each.low is not None for each in (mean, median, p90)] == [is_told] * 3


def test_nothing_is_estimated_of_nothing() -> None:
    assert estimate([LogHistogram()], [0.5]) == []
    assert estimate_ratios([LogHistogram()], [histogram_of([1.0])], [0.5]) == []


def test_ratio_excludes_1_only_when_runs_differ() -> None:
    rng = np.random.default_rng(7)

    def run(factor: float) -> list[LogHistogram]:
        parts = Parts(("e2e",))
        for value in rng.lognormal(0, 0.3, 200):
            parts.add([("e2e", factor * float(value), 1.0)])
        return parts.of("e2e")

    def excludes_1(factor: float) -> int:
        _, median = estimate_ratios(run(1), run(factor), [0.5])
        assert median.low is not None
        assert median.high is not None
        return not median.low < 1 < median.high

    assert sum(excludes_1(1.0) for _ in range(20)) <= 4
    assert sum(excludes_1(1.5) for _ in range(20)) == 20


@pytest.mark.parametrize(
    ("text", "seconds"), [("200ms", 0.2), ("1.5s", 1.5), ("2m", 120), ("3", 3), ("50 us", 5e-5)]
)
def test_time_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "-1s", "1d", "1e3"])
def test_time_is_refused_when_it_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: a number with us, ms, s, m or h"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (1.5e-5, "15.0 us"),
        (0.1234, "123 ms"),
        (1.0, "1.00 s"),
        (123.4, "123 s"),
        (0.09996, "100 ms"),
        (0.9999, "1.00 s"),
    ],
)
def test_time_is_written_with_three_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
