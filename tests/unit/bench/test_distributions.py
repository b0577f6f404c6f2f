"""Distributions as flags say them."""

from __future__ import annotations

import numpy as np
import pytest

from splitserve_bench.workloads.conversation import Distribution


def draws(text: str, number: int = 4000) -> list[float]:
    rng = np.random.default_rng(1)
    distribution = Distribution.parse(text)
    return [distribution.draw(rng) for _ in range(number)]


def test_distribution_is_constant_when_it_is_a_number() -> None:
    assert set(draws("512", 10)) == {512.0}


def test_distribution_has_the_range_when_it_is_uniform() -> None:
    values = draws("uniform:10:20")

    assert 10 <= min(values) < 10.1
    assert 19.9 < max(values) <= 20


def test_distribution_has_the_median_and_a_long_tail_when_it_is_lognormal() -> None:
    values = draws("lognormal:500:1.2")

    assert np.median(values) == pytest.approx(500, rel=0.1)
    # exp(1.2 * 2.326), by the normal distribution.
    assert np.quantile(values, 0.99) / np.median(values) == pytest.approx(16.3, rel=0.2)


def test_distribution_has_the_mean_when_it_is_exponential() -> None:
    assert np.mean(draws("exponential:2.5")) == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "uniform:1", "uniform:2:1", "lognormal:0:1", "normal:1:2", "inf", "1:2"]
)
def test_distribution_is_refused_with_what_is_allowed_when_it_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        Distribution.parse(text)


def test_count_keeps_within_its_limits() -> None:
    rng = np.random.default_rng(1)

    assert Distribution.parse("0").draw_count(rng) == 1
    assert Distribution.parse("70").draw_count(rng, largest=60) == 60
    assert Distribution.parse("2.6").draw_count(rng) == 3
