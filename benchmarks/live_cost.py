"""What somebody who looks at the live page costs: CPU time of real processes.

python -m benchmarks.live_cost [ROUNDS]

Four executors of 4,096 blocks, which compute nothing and take 25 ms for a step of 64 rows: 10,000
tokens/s. In turns nobody looks, and somebody does who reads ten frames a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import psutil

from splitserve_client import AsyncClient, SamplingParams, SplitserveError
from tests.support.processes.addresses import reserve_address

_NUM_EXECUTORS, _NUM_ROWS, _STEP_S = 4, 128, 0.025
_NUM_REQUESTS = _NUM_EXECUTORS * 64
_WINDOW_S = 6.0
# The most that there are.
_RATE = 10
_WARM_UP_S = 8.0


@asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[psutil.Process]:
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log
        )
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            await process.wait()


async def _ask_for_ever(client: AsyncClient, number: int) -> None:
    rng = random.Random(number)
    while True:
        prompt = [number + 1] * rng.randrange(200, 700)
        length = rng.randrange(100, 400)
        with contextlib.suppress(SplitserveError):
            await client.complete(prompt, SamplingParams(max_tokens=length, seed=number))


async def _look(address: str, num_bytes: list[int]) -> None:
    async with (
        httpx2.AsyncClient(timeout=None, trust_env=False) as client,
        client.stream("GET", f"http://{address}/feed?rate={_RATE}") as response,
    ):
        async for line in response.aiter_lines():
            num_bytes += [len(line)]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _measure(
    processes: list[psutil.Process], page: str | None
) -> tuple[list[float], list[int]]:
    """Percent of a core of each; sizes of frames."""
    num_bytes: list[int] = []
    looking = None if page is None else asyncio.create_task(_look(page, num_bytes))
    await asyncio.sleep(1)
    before = [_cpu_s(process) for process in processes]
    num_before = len(num_bytes)
    await asyncio.sleep(_WINDOW_S)
    used = [
        100 * (_cpu_s(process) - begun) / _WINDOW_S
        for process, begun in zip(processes, before, strict=True)
    ]
    if looking is not None:
        looking.cancel()
        await asyncio.wait({looking})
    return used, num_bytes[num_before:]


async def main(num_rounds: int) -> None:
    """Prints what each round used, and the differences."""
    scheduler, http, page = reserve_address(), reserve_address(), reserve_address()
    async with AsyncExitStack() as stack:
        start = stack.enter_async_context
        scheduling = await start(
            _process(
                *("-m", "scheduler_service", "--max-num-seqs", "128"),
                *("--listen", scheduler, "--cluster-listen", scheduler),
            )
        )
        await asyncio.sleep(3)
        executors = (str(_NUM_EXECUTORS), str(_NUM_ROWS), str(_STEP_S))
        await start(_process("-m", "benchmarks.many_executors", scheduler, *executors))
        flags = ("--http", http, "--schedulers", scheduler, "--live-listen", page)
        gateway = await start(_process("-m", "splitserve_gateway", *flags))
        client = await start(AsyncClient(scheduler))
        load = [asyncio.create_task(_ask_for_ever(client, n)) for n in range(_NUM_REQUESTS)]
        await asyncio.sleep(_WARM_UP_S)
        costs: list[list[float]] = []
        rates: list[float] = []
        for _ in range(num_rounds):
            alone, _ = await _measure([scheduling, gateway], None)
            watched, frames = await _measure([scheduling, gateway], page)
            costs.append([now - before for now, before in zip(watched, alone, strict=True)])
            rates.append(len(frames) / _WINDOW_S)
            sys.stdout.write(
                f"scheduler {alone[0]:5.1f} -> {watched[0]:5.1f} %   gateway {alone[1]:4.1f} -> "
                f"{watched[1]:4.1f} %   {rates[-1]:.1f} frames/s of "
                f"{statistics.mean(frames) / 1024:.1f} KiB\n"
            )
            sys.stdout.flush()
        for task in load:
            task.cancel()
        await asyncio.wait(load)
    medians = [statistics.median(each) for each in zip(*costs, strict=True)]
    sys.stdout.write(
        f"somebody who looks, at {statistics.median(rates):.1f} of {_RATE} frames/s: "
        f"scheduler {medians[0]:+.1f} %, gateway {medians[1]:+.1f} %, together "
        f"{sum(medians):+.1f} % of a core\n"
    )


if __name__ == "__main__":
    assert Path("benchmarks").is_dir(), "to be run in the repository's root"
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 4))
