"""A stack for the live page that is held in the middle of a step, and a page that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic_ns

from playwright.async_api import Browser, Page, ViewportSize, expect

from scheduler_service.config import ClusterConfig
from scheduler_service.scheduler.values import PolicyConfig, PreemptionMode
from scheduler_service.watching import LifeRecorder
from splitserve_client import AsyncClient, SamplingParams
from splitserve_live import LiveState
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.live_page import live_page
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process

PATIENCE_MS = 1000 * PATIENCE_S
DESKTOP: ViewportSize = {"width": 1360, "height": 900}
SWAPS = ClusterConfig(
    reconnect_timeout_s=0.1,
    step_patience_s=300.0,
    policies=PolicyConfig(preemption_mode=PreemptionMode.SWAP),
)
# All of these begin.
NUM_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Stack:
    """A scheduler whose only executor is held in the middle of a step, and who looks at it."""

    scheduler: SchedulerInProcess
    executor: FakeExecutor
    watch: StepWatch
    url: str
    page: Page
    asking: Mapping[str, asyncio.Task[object]]

    async def state(self) -> LiveState:
        """What the scheduler says now."""
        state = LiveState()
        with self.scheduler.view.watching(
            self.scheduler.cluster.scheduler, self.scheduler.cluster.submissions
        ) as watcher:
            state.take(watcher.frame())
        return state

    async def holders(self) -> set[str]:
        """Who holds blocks of the device, by their ids."""
        state = await self.state()
        (executor,) = state.executors.values()
        return {state.request(number).request_id for number in executor.device.holders if number}

    async def waiting(self) -> tuple[bool, list[str]]:
        """Whether all have come, and who waits, in order."""
        state = await self.state()
        (executor,) = state.executors.values()
        told, waiting = executor.latest, [*state.frame.waiting, *executor.latest.waiting]
        known = {*waiting, *told.running, *told.swapped}
        names = [request.request_id for request in state.requests(waiting)]
        return len(known) == len(self.asking), names

    def abort(self, request_id: str) -> None:
        """Takes a request back."""
        self.asking[request_id].cancel()

    async def speaks(self, selector: str, key: str) -> str:
        """What a key in a map or in steps has the page say."""
        await self.page.locator(selector).first.press(key)
        return await self.page.locator("#spoken").inner_text()


@asynccontextmanager
async def held_stack(
    chromium: Browser, viewport: ViewportSize | None = None, num_requests: int = NUM_REQUESTS
) -> AsyncIterator[Stack]:
    """Requests run, wait and are swapped out, and nothing moves."""
    watch = StepWatch()
    executor = FakeExecutor(num_device_blocks=24, num_host_blocks=64, fault=watch)
    async with (
        scheduler_in_process(
            executor, config=SWAPS, watchers=[LifeRecorder(100, monotonic_ns)]
        ) as scheduler,
        AsyncClient(scheduler.address) as client,
        live_page([scheduler.address]) as url,
    ):
        page = await chromium.new_page(viewport=viewport or DESKTOP)
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        params = SamplingParams(seed=1, max_tokens=30)
        asking = {
            name: asyncio.create_task(client.complete([7] * 8 + [number], params, request_id=name))
            for number, name in enumerate(f"request-{n:02}" for n in range(num_requests))
        }
        try:
            watch.hold(after=3)
            await watch.wait_held()
            while not scheduler.cluster.executors[0].engine.num_swapped:
                watch.hold(after=1)
                await watch.wait_held()
            await page.goto(url)
            await expect(page.locator("#connection")).to_have_text("live")
            yield Stack(scheduler, executor, watch, url, page, asking)
        finally:
            watch.release()
            for task in asking.values():
                task.cancel()
            await asyncio.wait(asking.values())
