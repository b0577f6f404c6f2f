"""Clients get their tokens whatever goes wrong in a cluster, and nothing is left behind.

A history that fails is printed with all that happened, and how to see it again.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import pytest

from tests.simulation.faults import World
from tests.simulation.history import run_history
from tests.simulation.scenario import (
    Draw,
    Scenario,
    disturbed,
    one_sick,
    random_scenario,
    through_gateways,
)

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "100"))
# In parts that processes share, in an order of which `cases` draws one of each kind.
_PARTS = [
    *((random_scenario, range(part, NUM_EXAMPLES, 4)) for part in (0, 1)),
    (through_gateways, range(0, NUM_EXAMPLES // 4, 2)),
    *((random_scenario, range(part, NUM_EXAMPLES, 4)) for part in (2, 3)),
    # No request fails for it.
    (one_sick, range(NUM_EXAMPLES // 4)),
    (through_gateways, range(1, NUM_EXAMPLES // 4, 2)),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("draw", "seeds"), _PARTS)
def test_history_has_no_problem_whatever_goes_wrong(draw: Draw, seeds: range) -> None:
    for seed in seeds:
        history = run_history(seed, draw=draw)
        assert not history.problems, history.report


@pytest.mark.parametrize(("draw", "seeds"), [(random_scenario, range(3)), (through_gateways, [2])])
def test_history_is_the_same_when_it_is_run_again(draw: Draw, seeds: list[int]) -> None:
    for seed in seeds:
        first, second = (run_history(seed, draw=draw, is_verbose=True) for _ in range(2))
        assert first.lines == second.lines
        assert first.num_calls == second.num_calls


# -- what our timers add to the absence of a scheduler ---------------------------------------------

STEP_S = 0.1
NUM_HISTORIES = 8
# A back-off of each side at its longest, half a dozen steps, and whatever the network delays.
MOST_S = 2.0


@dataclass(slots=True)
class Absence:
    """Of the only scheduler: it is killed, and comes back. `pauses_s`: of streams, since then."""

    lasting_s: float
    pauses_s: list[float]
    killed_at_s: float = 0.0

    async def happens(self, world: World, random: Random, lasting_s: float) -> None:
        """See `Fault`."""
        (scheduler,) = world.schedulers
        await asyncio.sleep(1.0)
        self.killed_at_s = asyncio.get_running_loop().time()
        scheduler.kill(is_silent=False)
        await asyncio.sleep(self.lasting_s)
        scheduler.start()

    def draw(self, random: Random) -> Scenario:
        """Nothing else goes wrong."""
        drawn = disturbed(random, faults=[self.happens])
        shapes = [
            replace(shape, step_s=STEP_S, byte_s=0.0, compile_s=0.0) for shape in drawn.shapes
        ]
        return replace(drawn, num_schedulers=1, shapes=shapes, check=self.look)

    def look(self, world: World) -> list[str]:
        """What the streams that were under way saw of it."""
        back_at_s = self.killed_at_s + self.lasting_s
        for client in world.clients:
            for outcome in client.outcomes:
                self.pauses_s += [
                    after_s - back_at_s
                    for before_s, after_s in pairwise(outcome.token_times_s)
                    if before_s <= self.killed_at_s and after_s > back_at_s
                ]
        return []


@pytest.mark.parametrize("lasting_s", [4.0, 5.0])
def test_streams_go_on_soon_when_their_scheduler_is_back(lasting_s: float) -> None:
    pauses_s: list[float] = []
    for seed in range(NUM_HISTORIES):
        history = run_history(seed, draw=Absence(lasting_s, pauses_s).draw)
        assert not history.problems, history.report
    assert pauses_s, "no stream was under way"
    assert max(pauses_s) <= MOST_S
