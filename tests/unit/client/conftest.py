from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from splitserve_client import AsyncClient, ClientConfig, RetryPolicy, Timing
from tests.support.fakes.fake_scheduler import FakeScheduler, start


class VirtualTime:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses_s: list[float] = []
        self.before_wake: Callable[[], Awaitable[None]] | None = None

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.pauses_s.append(seconds)
        if self.before_wake is not None:
            await self.before_wake()

    def config(self, **policy: float) -> ClientConfig:
        timing = Timing(self.clock, self.sleep, jitter=lambda: 1.0)
        return ClientConfig(retry=RetryPolicy(**policy), timing=timing)


@pytest.fixture
def virtual_time() -> VirtualTime:
    return VirtualTime()


@pytest.fixture
async def fake() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
async def address(fake: FakeScheduler) -> AsyncIterator[str]:
    running = await start(fake)
    yield f"127.0.0.1:{running.port}"
    await running.server.stop(None)


@pytest.fixture
async def client(address: str, virtual_time: VirtualTime) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address, virtual_time.config()) as client:
        yield client
