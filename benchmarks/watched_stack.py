"""A scheduler and a gateway that are watched in some ways, or in none, under a steady load."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import IO

import httpx2
import psutil

from benchmarks.ceiling import cpu_s, wait_connected
from benchmarks.serving import START_TIMEOUT_S
from tests.support.processes.addresses import reserve_address
from tests.support.processes.trace_collector import trace_collector

# The ways to watch, in the order in which they are reported.
PARTS = ("metrics", "traces", "logs", "live", "lives")
_SCRAPE_EVERY_S = 1.0
_FRAMES_PER_S = 10
_TIMEOUT_S = 30.0
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Shape:
    """What runs in every round, and how long it is looked at."""

    num_executors: int
    num_rows: int
    step_s: float
    warm_up_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """CPU times are of a core: microseconds for each token; `scheduler_ratio` for each second.

    `num_frames`: that somebody who looks was sent.
    """

    tokens_per_s: float
    scheduler_us: float
    gateway_us: float
    scheduler_ratio: float
    num_scrapes: int
    num_frames: int
    num_spans: int

    @property
    def gateway_ratio(self) -> float:
        """Of a core."""
        return self.gateway_us * self.tokens_per_s / 1e6


class _Watchers:
    """Prometheus, and somebody who looks."""

    def __init__(self) -> None:
        self.num_scrapes = self.num_frames = 0

    async def scrape(self, addresses: Sequence[str]) -> None:
        async with httpx2.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
            while True:
                for address in addresses:
                    (await client.get(f"http://{address}/metrics")).raise_for_status()
                    self.num_scrapes += 1
                await asyncio.sleep(_SCRAPE_EVERY_S)

    async def look(self, address: str) -> None:
        url = f"http://{address}/feed?rate={_FRAMES_PER_S}"
        async with (
            httpx2.AsyncClient(timeout=None, trust_env=False) as client,
            client.stream("GET", url) as response,
        ):
            response.raise_for_status()
            async for line in response.aiter_lines():
                self.num_frames += bool(line)


async def measure(shape: Shape, parts: frozenset[str]) -> Measured:
    """Everything anew, watched in these ways."""
    address, page = reserve_address(), reserve_address()
    metrics = [reserve_address(), reserve_address()]
    async with AsyncExitStack() as stack:
        start = stack.enter_async_context
        both: list[str] = ["--log-level", "error"]
        if "logs" in parts:
            both = ["--log-level", "info", "--log-format", "json"]
        collector = await start(trace_collector()) if "traces" in parts else None
        if collector is not None:
            both += ["--traces-to", collector.url]
        seen = [["--metrics-listen", each] if "metrics" in parts else [] for each in metrics]
        scheduler = await start(
            _process(
                "scheduler_service",
                *("--listen", address, "--cluster-listen", address),
                *("--max-num-seqs", str(shape.num_rows)),
                *("--max-num-batched-tokens", str(16 * shape.num_rows)),
                *(() if "lives" in parts else ("--remember-requests", "0")),
                *(*both, *seen[0]),
            )
        )
        sizes = map(str, (shape.num_executors, shape.num_rows, shape.step_s))
        await start(_process("benchmarks.many_executors", address, *sizes))
        await wait_connected(address, shape.num_executors)
        http = reserve_address()
        gateway = await start(
            _process(
                "splitserve_gateway",
                *("--http", http, "--schedulers", address),
                *(("--live-listen", page) if "live" in parts else ()),
                *(*both, *seen[1]),
            )
        )
        served = [http] + [page] * ("live" in parts) + metrics * ("metrics" in parts)
        await asyncio.gather(*map(_wait_listening, served))
        num_requests = str(shape.num_executors * shape.num_rows)
        load = await start(_process("benchmarks.session_load", address, num_requests))
        watchers = _Watchers()
        watching: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as tasks:
            await asyncio.sleep(shape.warm_up_s)
            if "metrics" in parts:
                watching.append(tasks.create_task(watchers.scrape(metrics)))
            if "live" in parts:
                watching.append(tasks.create_task(watchers.look(page)))
            # Whoever begins to look is told everything once; that is not what goes on.
            await asyncio.sleep(shape.warm_up_s / 4)
            before = await _read(scheduler, gateway, load, watchers)
            await asyncio.sleep(shape.seconds)
            after = await _read(scheduler, gateway, load, watchers)
            for task in watching:
                task.cancel()
        num_spans = 0 if collector is None else len(collector.spans)
    return _between(before, after, num_spans)


async def _wait_listening(address: str) -> None:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionError:
                await asyncio.sleep(_RETRY_S)
            else:
                writer.close()
                return


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    num_tokens: int
    scheduler_s: float
    gateway_s: float
    num_scrapes: int
    num_frames: int


async def _read(
    scheduler: subprocess.Popen[str],
    gateway: subprocess.Popen[str],
    load: subprocess.Popen[str],
    watchers: _Watchers,
) -> _Reading:
    scheduler_s, gateway_s = (cpu_s(psutil.Process(each.pid)) for each in (scheduler, gateway))
    num_tokens = await asyncio.to_thread(_num_tokens, load)
    now_s = asyncio.get_running_loop().time()
    counts = watchers.num_scrapes, watchers.num_frames
    return _Reading(now_s, num_tokens, scheduler_s, gateway_s, *counts)


def _num_tokens(load: subprocess.Popen[str]) -> int:
    assert load.stdin is not None
    assert load.stdout is not None
    load.stdin.write("\n")
    load.stdin.flush()
    return int(load.stdout.readline())


def _between(before: _Reading, after: _Reading, num_spans: int) -> Measured:
    elapsed_s = after.at_s - before.at_s
    num_tokens = after.num_tokens - before.num_tokens
    return Measured(
        num_tokens / elapsed_s,
        1e6 * (after.scheduler_s - before.scheduler_s) / num_tokens,
        1e6 * (after.gateway_s - before.gateway_s) / num_tokens,
        (after.scheduler_s - before.scheduler_s) / elapsed_s,
        after.num_scrapes - before.num_scrapes,
        after.num_frames - before.num_frames,
        num_spans,
    )


def _start(module: str, arguments: Sequence[str], log: IO[bytes]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )


@asynccontextmanager
async def _process(module: str, *arguments: str) -> AsyncIterator[subprocess.Popen[str]]:
    """A module that runs until the context ends. What it logs goes to a file, as it would."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.to_thread(_start, module, arguments, log)
        try:
            yield process
        finally:
            process.kill()
            await asyncio.to_thread(process.communicate)
