"""A cluster whose executors answer when they are told to, with one session before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from scheduler_service.callers.caller import Admission
from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from scheduler_service.executors.drains import Drained
from scheduler_service.executors.executor_link import LinkConfig
from scheduler_service.journal.journal import Journal
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values.request import Request, SchedulingParams
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from scheduler_service.streams.sinks import RequestSink, SessionStream
from scheduler_service.watching.transition import Watcher
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.scheduler.v1 import scheduler_pb2 as api
from tests.support.core.machines import BurstLink, Machine

FOREVER_S = 3600.0
MAX_TOKENS = 5
CONFIG = ClusterConfig()
NO_WISHES = SchedulingParams()


async def turns() -> None:
    """Lets everything happen that is under way."""
    for _ in range(20):
        await asyncio.sleep(0)


class Fleet:
    """Executors that answer when they are told to, and a session with requests."""

    def __init__(
        self,
        config: ClusterConfig = CONFIG,
        watcher: Callable[[Fleet], Watcher] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.machines: dict[str, Machine] = {}
        self.now_ns = 0
        self.cluster = Driver(
            config,
            1,
            lambda: None,
            now_ns=lambda: self.now_ns,
            journal=journal,
            watchers=() if watcher is None else (watcher(self),),
            connect=self.connect,
        )
        self.stream = SessionStream(self.cluster.delivery.new_outbox())
        self.cluster.delivery.open_stream(self.stream)

    def connect(self, info: pb.ExecutorInfo, _config: LinkConfig) -> BurstLink:
        """A way to the machine at the address of `info`."""
        return BurstLink(self.machines[info.address], info)

    async def join(self, machine: Machine) -> None:
        """The machine registers, and is asked who it is."""
        self.machines[machine.address] = machine
        await self.cluster.join(machine.info)
        await turns()

    def submit(
        self,
        *handles: int,
        scheduling: SchedulingParams = NO_WISHES,
        logit_bias: Mapping[int, float] | None = None,
    ) -> None:
        """Requests r1, r2 and so on, by handle, each with a prompt of its own."""
        for handle in handles:
            name = RequestName(f"r{handle}")
            params = SamplingParams(max_tokens=MAX_TOKENS, logit_bias=logit_bias or {})
            request = Request.create(
                name.key, [handle], params, arrival=handle, seed=handle, scheduling=scheduling
            )
            self.stream.begin(handle, name)
            self.cluster.submit(request, RequestSink(self.stream, handle), Admission(name))

    async def next_events(self) -> list[api.SessionEvent]:
        """What the session tells next, but for plain tokens."""
        while True:
            data = await self.stream.outbox.get()
            assert data is not None, "nobody ended it"
            events = api.SessionResponse.FromString(data).events
            if events:
                return list(events)

    def drain(self, machine: Machine, timeout_s: float = FOREVER_S) -> asyncio.Task[Drained]:
        """As an operator does; ends when the executor is gone."""
        return asyncio.create_task(self.cluster.drain_executor(machine.address, timeout_s))

    def requests_at(self, machine: Machine) -> list[str]:
        """What it has not finished."""
        engines = {each.address: each for each in self.cluster.executors}
        return sorted(engines[machine.address].engine.unfinished_request_ids)

    async def finish(self, machine: Machine) -> None:
        """Lets all steps of an executor be answered."""
        for _ in range(2 * MAX_TOKENS):
            if machine.link is not None:
                machine.link.release()
            await turns()
