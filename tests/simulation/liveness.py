"""Nobody is forgotten: where there is something to do and nothing is wrong, it is done.

Looks from outside, again and again; how long something may be so is far more than any step takes.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from scheduler_service.driver import Driver
from scheduler_service.executors import ExecutorLost
from scheduler_service.scheduler import ExecutorState
from tests.simulation.faults import World

_LOOK_EVERY_S = 0.1
# Far more than any step takes of those that are well.
_MOST_S = 4.0


@dataclass(slots=True)
class LivenessWatch:
    """Looks from now on; `problems`: each kind once."""

    world: World
    problems: list[str] = field(default_factory=list)
    _num_steps: dict[int, int] = field(default_factory=dict)
    # Since when each of these is so.
    _since_s: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for number, scheduler in enumerate(self.world.schedulers):
                if scheduler.cluster is not None and not self.problems:
                    self._look(number, scheduler.cluster)

    def _look(self, number: int, cluster: Driver) -> None:
        num_steps = self._num_steps.get(number, 0)
        self._num_steps[number] = cluster.membership.num_steps_answered
        there = [engine for engine in cluster.executors if engine.takes_requests]
        self._note(
            f"scheduler {number}: no step is answered, though there is something to do",
            # Who is in quarantine may wait for executors that were lost to come back.
            is_so=cluster.num_unfinished > cluster.scheduler.num_quarantined
            and bool(there)
            and num_steps == cluster.membership.num_steps_answered,
        )
        num_queued = sum(map(_num_queued, there))
        for engine in there:
            address = engine.address
            is_idle = _is_idle(engine)
            self._note(
                f"{address} has nothing to do, and requests have no executor",
                is_so=is_idle and cluster.scheduler.num_waiting > cluster.scheduler.num_quarantined,
            )
            self._note(
                f"{address} has nothing to do, and requests wait at others",
                is_so=is_idle and num_queued > 0,
            )

    def _note(self, what: str, *, is_so: bool) -> None:
        now_s = self.world.network.loop.time()
        if not is_so:
            self._since_s.pop(what, None)
        elif now_s - self._since_s.setdefault(what, now_s) > _MOST_S:
            self.problems.append(f"since {self._since_s[what]:.3f}: {what}")


def _is_idle(engine: ExecutorState) -> bool:
    with suppress(ExecutorLost):
        return engine.engine.num_unfinished == 0 and engine.engine.num_in_flight == 0
    return False


def _num_queued(engine: ExecutorState) -> int:
    with suppress(ExecutorLost):
        return len(engine.engine.preempted_request_ids)
    return 0
