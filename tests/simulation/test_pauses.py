"""How long streams pause when their scheduler was away, in virtual time: what our timers add."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import pytest

from tests.simulation.faults import World
from tests.simulation.history import run_history
from tests.simulation.scenario import Scenario, disturbed

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
