"""A scheduler process with fake executors, and the real client: `fake_service`."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from executor_service.steps import StepInput
from splitserve_client import AsyncClient, ExecutorList
from tests.contract.stranger.process import Scheduler, poll, running_scheduler
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.fake_runner import StepFault, no_fault
from tests.support.processes.patience import PATIENCE_S, PATIENT_AT_CALLS

DIGEST = "fa4e" * 16
TIMEOUT_S = PATIENCE_S


class StepWatch:
    """The `fault` of a FakeExecutor: sees its steps, holds them, and lets `fault` spoil them.

    `steps`: those that began, over all lives. A step is held before anything of it is done.
    """

    def __init__(self, fault: Callable[[StepInput], StepFault] = no_fault) -> None:
        self.steps: list[StepInput] = []
        self.fault = fault
        # Steps that may begin before one is held; None: all.
        self._num_allowed: int | None = None
        self._allowed = threading.Condition()
        self._held = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, step: StepInput) -> StepFault:
        """Called by the runner, in its thread."""
        with self._allowed:
            self.steps.append(step)
            number = len(self.steps)
            if not self._may_run(number):
                self._loop.call_soon_threadsafe(self._held.set)
                is_released = self._allowed.wait_for(lambda: self._may_run(number), TIMEOUT_S)
                assert is_released, "nobody released the step"
        return self.fault(step)

    def _may_run(self, number: int) -> bool:
        return self._num_allowed is None or number <= self._num_allowed

    def hold(self, after: int = 0) -> None:
        """Releases the held step, lets `after` more steps begin, and holds the next one."""
        with self._allowed:
            self._held.clear()
            self._num_allowed = len(self.steps) + after
            self._allowed.notify_all()

    async def wait_held(self) -> None:
        """Waits until a step is held."""
        async with asyncio.timeout(TIMEOUT_S):
            await self._held.wait()

    def release(self) -> None:
        """Lets all steps go on."""
        with self._allowed:
            self._num_allowed = None
            self._allowed.notify_all()


def seeds_of(steps: Sequence[StepInput]) -> Counter[int]:
    """Number of rows of each seed in these steps."""
    return Counter(seed for step in steps for seed in step.seeds.tolist())


@dataclass(frozen=True, slots=True)
class FakeService:
    """Running scheduler, its fake executors, and a client."""

    scheduler: Scheduler
    client: AsyncClient
    executors: Sequence[FakeExecutor]

    async def wait_for(self, holds: Callable[[ExecutorList], bool]) -> ExecutorList:
        """Asks the scheduler until `holds` of its executors. Raises TimeoutError."""

        async def ask() -> tuple[bool, ExecutorList]:
            listed = await self.client.list_executors()
            return holds(listed), listed

        return await poll(ask, TIMEOUT_S)

    async def wait_connected(self, num_executors: int) -> None:
        """Waits until exactly this number of executors is connected."""
        await self.wait_for(
            lambda listed: sum(e.is_connected for e in listed.executors) == num_executors
        )

    async def wait_until_queued(self, num_requests: int) -> None:
        """Waits until exactly this number of requests waits at executors."""
        await self.wait_for(
            lambda listed: sum(e.num_waiting_requests for e in listed.executors) == num_requests
        )

    async def wait_until_known(self, num_requests: int) -> None:
        """Waits until the only executor has exactly this number of requests."""
        await self.wait_for(
            lambda listed: (
                sum(
                    e.num_running_requests + e.num_waiting_requests + e.num_swapped_requests
                    for e in listed.executors
                )
                == num_requests
            )
        )

    async def wait_idle(self) -> None:
        """Waits until no request is anywhere and every block is free."""
        await self.wait_for(
            lambda listed: (
                listed.num_unassigned_requests == 0
                and all(
                    e.num_running_requests == e.num_waiting_requests == e.num_swapped_requests == 0
                    and e.num_free_device_blocks == e.num_device_blocks
                    and e.num_free_host_blocks == e.num_host_blocks
                    for e in listed.executors
                )
            )
        )

    async def kill(self, executor: FakeExecutor, watch: StepWatch) -> None:
        """Ends the life of `executor`, whose `watch` holds a step, as SIGKILL does."""
        num_connected = sum(e.is_connected for e in (await self.client.list_executors()).executors)
        killing = asyncio.create_task(executor.kill())
        await self.wait_connected(num_connected - 1)
        watch.release()
        await killing


@asynccontextmanager
async def fake_service(*executors: FakeExecutor, **options: object) -> AsyncIterator[FakeService]:
    """A scheduler with `executors` (none means a plain one), and a client. Options are flags.

    Afterwards asserts that no executor was asked to read what is not there.
    """
    executors = executors or (FakeExecutor(),)
    async with AsyncExitStack() as stack:
        options = {"reconnect_timeout_s": 0.1, **options}
        scheduler = await stack.enter_async_context(running_scheduler(**options))
        client = await stack.enter_async_context(AsyncClient(scheduler.address, PATIENT_AT_CALLS))
        service = FakeService(scheduler, client, executors)
        for executor in executors:
            executor.scheduler_address = scheduler.address
            executor.digest = DIGEST
            await stack.enter_async_context(executor)
            if isinstance(executor.fault, StepWatch):
                stack.callback(executor.fault.release)
        await service.wait_connected(len(executors))
        yield service
        for executor in executors:
            assert executor.violations == []
