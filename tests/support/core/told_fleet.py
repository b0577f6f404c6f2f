"""A fleet whose requests' lives are written down."""

from __future__ import annotations

from scheduler_service.callers.caller import Admission
from scheduler_service.config import ClusterConfig
from scheduler_service.journal.journal import Journal
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values.request import Request
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from scheduler_service.streams.sinks import RequestSink
from scheduler_service.watching.life import Life, LifeEvent, LifeKind
from scheduler_service.watching.life_recorder import LifeRecorder
from tests.support.core.machines import Machine
from tests.support.core.stepped_fleet import Fleet, turns

S = 1_000_000_000


class ToldFleet:
    """A fleet with a recorder, and what that has."""

    def __init__(
        self,
        config: ClusterConfig | None = None,
        num_kept: int = 10,
        journal: Journal | None = None,
    ) -> None:
        made: list[LifeRecorder] = []

        def watcher(fleet: Fleet) -> LifeRecorder:
            made.append(LifeRecorder(num_kept, lambda: fleet.now_ns))
            return made[0]

        self.fleet = Fleet(config or ClusterConfig(), watcher, journal)
        self.recorder = made[0]

    def life(self, handle: int) -> Life:
        """Of request r1, r2 and so on."""
        lives = [*self.recorder.living, *self.recorder.ended]
        return next(each for each in lives if each.request_id == f"r{handle}")

    def kinds(self, handle: int) -> list[str]:
        """What happened to it."""
        return [event.kind.value for event in self.life(handle).events]

    def event(self, handle: int, kind: LifeKind) -> LifeEvent:
        """The first of this kind."""
        return next(each for each in self.life(handle).events if each.kind is kind)

    def submit_long(self, handle: int, num_tokens: int, max_tokens: int) -> None:
        """A request with such a prompt."""
        name = RequestName(f"r{handle}")
        prompt = [handle + n for n in range(num_tokens)]
        params = SamplingParams(max_tokens=max_tokens)
        request = Request.create(name.key, prompt, params, arrival=handle, seed=handle)
        stream = self.fleet.stream
        stream.begin(handle, name)
        self.fleet.cluster.submit(request, RequestSink(stream, handle), Admission(name))

    async def release(self, machine: Machine, seconds: float = 1) -> None:
        """A step is answered after so long."""
        self.fleet.now_ns += int(seconds * S)
        assert machine.link is not None
        machine.link.release()
        await turns()

    async def replace(self, lost: Machine, following: Machine) -> None:
        """A machine is lost in the middle of what it has; then another joins."""
        assert lost.link is not None
        lost.link.break_off()
        await turns()
        await self.fleet.join(following)

    async def close(self) -> None:
        """Nothing runs any more."""
        await self.fleet.cluster.drain(0)
