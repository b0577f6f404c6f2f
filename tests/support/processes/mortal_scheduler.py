"""A scheduler process that can be killed, drained and started again, with an executor of texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from splitserve_client import AsyncClient, Executor
from tests.contract.stranger.process import Scheduler, poll, running_scheduler
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.addresses import reserve_address
from tests.support.processes.fake_service import DIGEST, TIMEOUT_S, StepWatch
from tests.support.processes.gateway import text_executor
from tests.support.processes.patience import PATIENT_AT_CALLS


@dataclass
class MortalScheduler:
    """A scheduler, whose lives are all at one address, and its executor, which outlives them."""

    executor: FakeExecutor
    watch: StepWatch
    address: str
    lives: AsyncExitStack
    options: dict[str, object]
    scheduler: Scheduler

    async def start(self) -> None:
        """Begins another life, and waits until the executor is there."""
        self.scheduler = await _begin(self.lives, self.address, self.options)
        await self.wait_executor()

    async def kill(self) -> None:
        """Ends its life as SIGKILL does."""
        self.scheduler.process.kill()
        await self.wait_gone()

    async def wait_gone(self) -> None:
        """Waits until the process has ended."""
        await asyncio.to_thread(self.scheduler.process.wait)

    async def wait_executor(self) -> None:
        """Waits until the executor is connected."""

        async def ask() -> tuple[bool, object]:
            executors = await self._executors()
            return any(e.is_connected for e in executors), executors

        await poll(ask, TIMEOUT_S)

    async def wait_requests(self, num_requests: int) -> None:
        """Waits until just so many requests run or wait."""

        async def ask() -> tuple[bool, object]:
            executors = await self._executors()
            nums = [e.num_running_requests + e.num_waiting_requests for e in executors]
            return sum(nums) == num_requests, executors

        await poll(ask, TIMEOUT_S)

    async def _executors(self) -> tuple[Executor, ...]:
        async with AsyncClient(self.address, PATIENT_AT_CALLS) as client:
            return tuple((await client.list_executors()).executors)


@asynccontextmanager
async def mortal_scheduler(
    folder: Path, address: str | None = None, *, model_name: str = "fake", **options: object
) -> AsyncIterator[MortalScheduler]:
    """A scheduler at `address`, whose flags `options` are; its executor's tokens are text."""
    address, watch = address or reserve_address(), StepWatch()
    options = {"reconnect_timeout_s": 0.1, **options}
    async with AsyncExitStack() as lives:
        scheduler = await _begin(lives, address, options)
        executor = text_executor(folder, fault=watch, model_name=model_name, digest=DIGEST)
        executor.scheduler_address = address
        await lives.enter_async_context(executor)
        lives.callback(watch.release)
        running = MortalScheduler(executor, watch, address, lives, options, scheduler)
        await running.wait_executor()
        yield running


async def _begin(lives: AsyncExitStack, address: str, options: dict[str, object]) -> Scheduler:
    return await lives.enter_async_context(running_scheduler(listen=address, **options))
