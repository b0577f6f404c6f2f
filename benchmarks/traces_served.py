"""CPU time of a scheduler process for each token that it serves, with and without traces.

python -m benchmarks.traces_served

In turns, so that what else the machine does falls on all alike.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

import psutil

from splitserve_client import AsyncClient, SamplingParams
from tests.contract.stranger.process import running_scheduler
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import DIGEST, FakeService
from tests.support.processes.trace_collector import trace_collector

_NUM_REQUESTS = 256
_NUM_AT_A_TIME = 64
_NUM_TOKENS = 120
_NUM_TURNS = 4


async def us_per_token(**flags: object) -> float:
    """Of a scheduler with `flags`."""
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(running_scheduler(max_run_ahead=1, **flags))
        client = await stack.enter_async_context(AsyncClient(scheduler.address))
        executor = FakeExecutor(scheduler.address, num_device_blocks=8192, digest=DIGEST)
        await stack.enter_async_context(executor)
        await FakeService(scheduler, client, [executor]).wait_connected(1)
        await _load(client)  # everything is imported and warm
        process = psutil.Process(scheduler.process.pid)
        before_s = _cpu_s(process)
        await _load(client)
        return (_cpu_s(process) - before_s) / (_NUM_REQUESTS * _NUM_TOKENS) * 1e6


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _load(client: AsyncClient) -> None:
    places = asyncio.Semaphore(_NUM_AT_A_TIME)
    async with client.session() as session:

        async def one(number: int) -> None:
            params = SamplingParams(seed=number, max_tokens=_NUM_TOKENS, ignore_eos=True)
            async with places:
                async for _ in session.submit([number % 100, 2, 3], params):
                    pass

        await asyncio.gather(*map(one, range(_NUM_REQUESTS)))


async def _measure() -> None:
    async with trace_collector() as collector:
        kinds: dict[str, dict[str, object]] = {
            "no traces": {},
            "1 % traced": {"traces_to": collector.url},
            "all traced": {"traces_to": collector.url, "trace_sampling": 1},
            "all traced, the collector is gone": {
                "traces_to": "http://127.0.0.1:1",
                "trace_sampling": 1,
            },
        }
        took: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(_NUM_TURNS):
            for kind, flags in kinds.items():
                took[kind].append(await us_per_token(**flags))
    for kind, each in took.items():
        sys.stdout.write(f"{min(each):6.1f} us of CPU a token, at best of {_NUM_TURNS}: {kind}\n")


if __name__ == "__main__":
    asyncio.run(_measure())
