"""Clients of gateways get the truth whatever goes wrong in a cluster, in virtual time."""

from __future__ import annotations

import os

from tests.simulation.gateway_scenario import through_gateways
from tests.simulation.history import run_history

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "100"))


def test_clients_of_gateways_get_the_truth_when_schedulers_are_lost() -> None:
    for seed in range(NUM_EXAMPLES // 4):
        history = run_history(seed, draw=through_gateways)
        assert not history.problems, history.report


def test_gateway_history_is_the_same_when_it_is_run_again() -> None:
    first, second = (run_history(2, draw=through_gateways, is_verbose=True) for _ in range(2))
    assert first.lines == second.lines
    assert first.num_calls == second.num_calls
