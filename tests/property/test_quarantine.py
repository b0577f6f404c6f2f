"""Requests of which executors die are found, whatever their rhythm, and nobody else is failed."""

from __future__ import annotations

import os
from math import log2
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler.executor_losses import (
    FORGIVING_TOKENS,
    NUM_ALONE_IN_A_STORM,
    LossCause,
)
from scheduler_service.scheduler.quarantine import REASON
from scheduler_service.scheduler.values.sampling_params import BeamParams, SamplingParams
from tests.support.core.poisoned_fleet import AtRandom, EveryStep, PoisonedFleet, Widening

MAX_TOKENS = 130
PLAIN = SamplingParams(max_tokens=MAX_TOKENS)
KINDS = (
    PLAIN,
    SamplingParams(max_tokens=MAX_TOKENS, n=3),
    SamplingParams(max_tokens=MAX_TOKENS, n=2, best_of=4),
    SamplingParams(max_tokens=MAX_TOKENS, beam=BeamParams(3)),
)


def fill(fleet: PoisonedFleet, count: int, poison: SamplingParams = PLAIN) -> None:
    """The first is the poison."""
    fleet.add(poison)
    for number in range(1, count):
        fleet.add(SamplingParams(max_tokens=20 + 7 * number % 60))


def check_ends(fleet: PoisonedFleet, *guilty: str) -> None:
    """The guilty are failed by name, all others have their tokens, which `run` compares."""
    reasons = {name: client.request.error for name, client in fleet.clients.items()}
    assert {name for name, error in reasons.items() if error is not None} == set(guilty)
    assert all(error is None or error[0] == REASON for error in reasons.values())


@pytest.mark.parametrize("max_losses", [1, 2])
@pytest.mark.parametrize("period", [1, 5, FORGIVING_TOKENS])
@pytest.mark.parametrize("kind", KINDS)
def test_poison_is_failed_after_one_more_than_is_allowed_when_it_kills_often(
    kind: SamplingParams, period: int, max_losses: int
) -> None:
    fleet = PoisonedFleet([EveryStep("r1", period)], max_losses=max_losses)
    fill(fleet, 8, kind)

    fleet.run()

    check_ends(fleet, "r1")
    assert fleet.num_deaths == max_losses + 1


@pytest.mark.parametrize("period", [17, 20, 40, 100])
def test_poison_costs_two_more_each_time_that_it_kills_half_as_often(period: int) -> None:
    fleet = PoisonedFleet([EveryStep("r1", period)])
    fill(fleet, 8, SamplingParams(max_tokens=900))

    fleet.run()

    check_ends(fleet, "r1")
    # Some are forgiven before the next, and longer trials are repeated.
    assert fleet.num_deaths <= 5 + 2 * log2((period - 1) / FORGIVING_TOKENS)


def test_poison_is_failed_when_it_comes_through_trials_and_kills_later() -> None:
    fleet = PoisonedFleet([Widening("r1", 2)])
    fill(fleet, 8, SamplingParams(max_tokens=900))

    fleet.run()

    check_ends(fleet, "r1")
    assert fleet.num_deaths <= 12


@pytest.mark.parametrize("periods", [(1, 1), (3, 5), (1, 7), (12, 2)])
def test_two_poisons_are_failed_when_they_kill_together(periods: tuple[int, int]) -> None:
    fleet = PoisonedFleet([EveryStep("r1", periods[0]), EveryStep("r2", periods[1])])
    fleet.add(PLAIN)
    fill(fleet, 8)

    fleet.run()

    check_ends(fleet, "r1", "r2")
    assert fleet.num_deaths <= (2 + NUM_ALONE_IN_A_STORM) + (2 + 1)


@settings(max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "25")), deadline=None)
@given(
    periods=st.lists(st.integers(1, FORGIVING_TOKENS), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 3),
    num_executors=st.integers(1, 4),
    max_losses=st.integers(1, 3),
)
def test_poisons_are_failed_and_only_they_when_requests_of_all_kinds_run(
    periods: list[int], seed: int, depth: int, num_executors: int, max_losses: int
) -> None:
    rng, names = Random(seed), [f"r{number}" for number in range(1, len(periods) + 1)]
    kills = [EveryStep(name, period) for name, period in zip(names, periods, strict=True)]
    fleet = PoisonedFleet(kills, num_executors, depth=depth, max_losses=max_losses)
    for _ in names:
        fleet.add(rng.choice(KINDS))
    for _ in range(rng.randrange(4)):
        fleet.add(SamplingParams(max_tokens=rng.randrange(1, 40), n=rng.choice([1, 1, 2])))

    fleet.run()

    check_ends(fleet, *names)
    each = max_losses + NUM_ALONE_IN_A_STORM + 1
    assert fleet.num_deaths <= each * len(names)


@settings(max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "25")), deadline=None)
@given(
    num_poisons=st.integers(1, 6),
    num_innocents=st.integers(0, 12),
    num_executors=st.integers(1, 6),
    restart_steps=st.sampled_from([0, 1, 20, 300]),
    depth=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_poisons_cost_one_executor_each_and_a_few_before_when_they_come_at_once(
    num_poisons: int,
    num_innocents: int,
    num_executors: int,
    restart_steps: int,
    depth: int,
    seed: int,
) -> None:
    rng = Random(seed)
    names = [f"r{number}" for number in range(1, num_poisons + num_innocents + 1)]
    poisons = rng.sample(names, num_poisons)
    fleet = PoisonedFleet(
        [EveryStep(name, 1) for name in poisons],
        num_executors,
        depth=depth,
        restart_steps=restart_steps,
    )
    for _ in names:
        fleet.add(SamplingParams(max_tokens=rng.randrange(1, 60)))

    fleet.run()

    check_ends(fleet, *poisons)
    # Each executor may die of some twice before these are isolated, and once after the first of
    # them is failed.
    assert fleet.num_deaths <= num_poisons + 2 * min(num_poisons, num_executors) + 1


@settings(max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "25")), deadline=None)
@given(
    arrivals=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    num_executors=st.integers(1, 4),
    restart_steps=st.sampled_from([0, 20, 300]),
    seed=st.integers(0, 2**32),
)
def test_poisons_cost_three_executors_each_at_most_whenever_they_come(
    arrivals: list[int], num_executors: int, restart_steps: int, seed: int
) -> None:
    rng = Random(seed)
    poisons: list[str] = []
    kills = [EveryStep(f"poison {number}", 1) for number in range(len(arrivals))]
    fleet = PoisonedFleet(kills, num_executors, restart_steps=restart_steps)
    for at_step in sorted(arrivals):
        while fleet.num_steps < at_step or not fleet.living:
            fleet.step()
        for _ in range(rng.randrange(3)):
            fleet.add(SamplingParams(max_tokens=rng.randrange(1, 60)))
        kills[len(poisons)].request_id = fleet.add(PLAIN).request_id
        poisons.append(kills[len(poisons)].request_id)

    fleet.run()

    check_ends(fleet, *poisons)
    assert fleet.num_deaths <= 3 * len(poisons)


@pytest.mark.parametrize("seed", range(4))
def test_nobody_is_failed_when_executors_die_of_nothing_in_particular(seed: int) -> None:
    fleet = PoisonedFleet([AtRandom(300, Random(seed))])
    for number in range(16):
        fleet.add(SamplingParams(max_tokens=50 + 20 * number))

    fleet.run()

    check_ends(fleet)
    assert fleet.num_deaths >= 2


@pytest.mark.parametrize("seed", range(4))
def test_poison_is_failed_when_executors_die_of_other_things_too(seed: int) -> None:
    fleet = PoisonedFleet([EveryStep("r1", 3), AtRandom(300, Random(seed))])
    fill(fleet, 16)

    fleet.run()

    check_ends(fleet, "r1")


def test_poison_is_failed_when_its_executors_are_only_out_of_reach() -> None:
    fleet = PoisonedFleet([EveryStep("r1", 2)], cause=LossCause.SILENT)
    fill(fleet, 8)

    fleet.run()

    check_ends(fleet, "r1")
    assert fleet.num_deaths == 2 + NUM_ALONE_IN_A_STORM
