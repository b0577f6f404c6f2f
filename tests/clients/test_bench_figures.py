"""The figures of `splitserve bench` are those of a server of known timings, and of GuideLLM."""

from __future__ import annotations

import pytest

from tests.clients.bench_check import (
    GUIDELLM,
    LOADS,
    Figure,
    bench_figures,
    differences,
    guidellm_figures,
    paced,
    recorded_figures,
)
from tests.support.bench import paced_server


@pytest.mark.parametrize("name", LOADS)
def test_bench_figures_are_those_that_the_server_recorded(name: str) -> None:
    load = LOADS[name]
    with paced(load.num_served) as url:
        ours = bench_figures(load, url)
        assert differences(ours, recorded_figures(url)) == []


@pytest.mark.thorough("GuideLLM takes 15 s of CPU to start; the server's record stays")
@pytest.mark.skipif(
    not (GUIDELLM / ".ready").exists(), reason="it is not installed: make .tools/guidellm/.ready"
)
@pytest.mark.parametrize("name", LOADS)
def test_bench_figures_are_those_of_guidellm_under_the_same_load(name: str) -> None:
    load = LOADS[name]
    with paced(load.num_served) as url:
        ours = bench_figures(load, url)
        # Both meet the same timings: those since the last record.
        recorded_figures(url)
        theirs = guidellm_figures(load, url, paced_server.MODEL)
    assert differences(ours, theirs) == []


def test_figures_differ_when_their_intervals_do_not_overlap() -> None:
    ours = {"ttft mean": Figure(2.0, 1.0, 3.0), "e2e mean": Figure(5.0, 4.0, 6.0)}
    others = {"ttft mean": Figure.exact(3.1), "e2e mean": Figure(6.5, 5.9, 7.0)}
    assert differences(ours, others) == [
        "ttft mean: 2 (1 to 3), but the other has 3.1 (3.1 to 3.1)"
    ]
