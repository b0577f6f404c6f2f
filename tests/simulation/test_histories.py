"""Whatever goes wrong in a cluster, its clients get the truth, and nothing is left behind.

A history that fails is printed with all that happened, and how to see it again.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.history import run_history
from tests.simulation.scenario import one_sick

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "100"))
# So that processes can share them.
_NUM_PARTS = 4


@pytest.mark.parametrize("part", range(_NUM_PARTS))
def test_clients_get_the_truth_when_anything_goes_wrong(part: int) -> None:
    for seed in range(part, NUM_EXAMPLES, _NUM_PARTS):
        history = run_history(seed)
        assert not history.problems, history.report


@pytest.mark.parametrize("part", range(2))
def test_no_request_fails_when_one_executor_of_several_is_sick(part: int) -> None:
    for seed in range(part, NUM_EXAMPLES // 4, 2):
        history = run_history(seed, draw=one_sick)
        assert not history.problems, history.report


def test_history_is_the_same_when_it_is_run_again() -> None:
    for seed in range(3):
        first, second = (run_history(seed, is_verbose=True) for _ in range(2))
        assert first.lines == second.lines
        assert first.num_calls == second.num_calls
