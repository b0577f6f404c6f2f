"""Histories of `tests/simulation` in which a fault shows soon, by the name of what they begin with.

Imports what mutants change: after a fault was planted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from types import MappingProxyType

from splitserve_client import SamplingParams
from tests.simulation.faults import (
    Fault,
    break_off,
    cut,
    drain_executor,
    fail_rows,
    kill_executor,
    kill_scheduler,
    reset,
)
from tests.simulation.history import run_history
from tests.simulation.scenario import (
    Draw,
    Scenario,
    burst,
    contended,
    disturbed,
    growing,
    one_sick,
    random_scenario,
    through_gateways,
)
from tests.simulation.workload import Wanted

# Times that a fault happens in each history that is to have it.
_NUM_FAULTS = 6


def _with(*faults: Fault) -> Draw:
    several = [faults[number % len(faults)] for number in range(_NUM_FAULTS)]
    return partial(disturbed, faults=several)


def _of_the_best(random: Random) -> Scenario:
    """Requests whose answers come at once, at the end of each: a break may be among them."""
    scenario = _with(break_off)(random)
    wanted = [[replace(each, params=_best_of(each)) for each in some] for some in scenario.wanted]
    return replace(scenario, wanted=wanted)


def _best_of(wanted: Wanted) -> SamplingParams:
    seed = wanted.params.seed
    return SamplingParams(n=3, best_of=4, max_tokens=4, seed=seed, ignore_eos=True)


def _recorded(random: Random) -> Scenario:
    return replace(growing(random), records=True)


DRAWS: Mapping[str, Draw] = MappingProxyType(
    {
        "random_scenario": random_scenario,
        "burst": burst,
        "contended": contended,
        "growing": growing,
        "lost": _with(kill_executor, reset),
        "failing": _with(fail_rows),
        "cut_off": _with(kill_scheduler, reset, cut),
        "drained": _with(drain_executor),
        "one_sick": one_sick,
        "of_the_best": _of_the_best,
        "recorded": _recorded,
        "through_gateways": through_gateways,
    }
)


def num_until_wrong(draw: str, seeds: Sequence[int]) -> int | None:
    """How many of these histories it takes until one has a problem; None: none has."""
    for count, seed in enumerate(seeds, 1):
        if run_history(seed, draw=DRAWS[draw]).problems:
            return count
    return None
