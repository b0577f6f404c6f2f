"""What one scheduler process carries: executors, streams and tokens, until its core is full.

A real scheduler; executors in another process compute nothing and take `--step-ms` for a step; this
process has one Session with as many requests as there are rows, and looks at no more than their
number. `full`: tokens/s by that of executors that never wait. `period_ms`: from one step of an
executor to its next, which is `--step-ms` where the scheduler is no hindrance. `scheduler_cpu`: of
a core; near 1 the scheduler is what limits. `us_per_step`, `us_per_token`, `us_per_request`: the
CPU time of the scheduler process by the number of each, all of it each time. Long requests, as by
default, say what a step costs; short ones (`--prompt-tokens 20 --max-tokens 2`) what a request
does. One JSON object for each number of executors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc.aio
import psutil

from benchmarks.report import emit, percentile
from benchmarks.serving import START_TIMEOUT_S
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve.scheduler.v1 import scheduler_pb2_grpc
from splitserve_client import AsyncClient, SplitserveError
from splitserve_common import with_fewer_threads
from splitserve_rpc import channel_options
from tests.support.processes.addresses import reserve_address

_WARM_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each request: of its prompt, and the most that it gets."""

    num_prompt_tokens: int
    max_tokens: int


LONG = Lengths(num_prompt_tokens=32, max_tokens=256)


class Load:
    """Keeps `num_requests` running over one Session, and counts their tokens and their ends."""

    def __init__(self, address: str, num_requests: int, lengths: Lengths = LONG) -> None:
        self._address = address
        self._num_requests = num_requests
        self._lengths = lengths
        self._to_send: asyncio.Queue[int] = asyncio.Queue()
        self._takes_submissions = False
        self.num_tokens = self.num_ended = 0

    async def run(self) -> None:
        """Until cancelled."""
        for handle in range(1, self._num_requests + 1):
            self._to_send.put_nowait(handle)
        async with grpc.aio.insecure_channel(self._address, channel_options()) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            async for response in stub.Session(self._requests()):
                self._takes_submissions |= response.takes_submissions
                self.num_tokens += len(response.token_ids)
                for event in response.events:
                    if event.HasField("finish"):
                        self.num_ended += 1
                        self._to_send.put_nowait(event.handle + self._num_requests)
                    elif event.HasField("rejected"):
                        raise RuntimeError(f"a request was refused: {event.rejected}")

    async def _requests(self) -> AsyncIterator[api.SessionRequest]:
        while True:
            message = api.SessionRequest(submit=self._submit(await self._to_send.get()))
            while self._takes_submissions and not self._to_send.empty():
                message.submissions.append(self._submit(self._to_send.get_nowait()))
            yield message

    def _submit(self, handle: int) -> api.SessionSubmit:
        most = self._lengths.max_tokens
        # Ends are spread, so that not all begin anew at once.
        num_tokens = most - handle % self._num_requests % max(most // 2, 1)
        params = api.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prompt = [handle % 30_000 + 3] * self._lengths.num_prompt_tokens
        request = api.GenerateRequest(
            request_id=str(handle), prompt_token_ids=prompt, sampling_params=params
        )
        return api.SessionSubmit(handle=handle, request=request)


@contextmanager
def process(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A module that runs until the context ends, with gRPC's threads as `splitserve serve` has."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=with_fewer_threads(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def wait_connected(address: str, num_executors: int) -> None:
    """Until the scheduler has so many executors."""
    async with asyncio.timeout(START_TIMEOUT_S), AsyncClient(address) as client:
        while True:
            try:
                known = (await client.list_executors()).executors
                if sum(executor.is_connected for executor in known) == num_executors:
                    return
            except SplitserveError:
                pass
            await asyncio.sleep(0.2)


async def measure(
    num_executors: int,
    num_rows: int,
    step_s: float,
    seconds: float,
    lengths: Lengths = LONG,
    hold: str | None = None,
) -> None:
    """Prints the figures of so many executors. `hold`: a command that is run meanwhile."""
    address = reserve_address()
    listen = ("--listen", address, "--cluster-listen", address, "--log-level", "error")
    rows = ("--max-num-seqs", str(num_rows), "--max-num-batched-tokens", str(16 * num_rows))
    waiting = ("--max-num-waiting", str(max(1024, num_executors * num_rows)))
    executors = (address, str(num_executors), str(num_rows), str(step_s))
    with (
        process("scheduler_service", *listen, *rows, *waiting) as scheduler,
        process("benchmarks.many_executors", *executors) as many,
    ):
        await wait_connected(address, num_executors)
        load = Load(address, num_executors * num_rows, lengths)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(_WARM_UP_S)
        await asyncio.to_thread(_periods_ms, many)
        used = psutil.Process(scheduler.pid)
        others = [psutil.Process(many.pid), psutil.Process()]
        before = [cpu_s(each) for each in (used, *others)]
        num_before, num_ended_before = load.num_tokens, load.num_ended
        start_s = time.perf_counter()
        if hold is not None:
            profiler = await asyncio.create_subprocess_shell(hold.format(pid=scheduler.pid))
            await profiler.wait()
        else:
            await asyncio.sleep(seconds)
        elapsed_s = time.perf_counter() - start_s
        if running.done():
            running.result()
        after = [cpu_s(each) for each in (used, *others)]
        num_tokens, num_ended = load.num_tokens - num_before, load.num_ended - num_ended_before
        tokens_per_s = num_tokens / elapsed_s
        periods_ms = await asyncio.to_thread(_periods_ms, many)
        cpu = [round((b - a) / elapsed_s, 2) for a, b in zip(before, after, strict=True)]
        used_us = 1e6 * (after[0] - before[0])
        emit(
            "ceiling",
            executors=num_executors,
            rows=num_rows,
            streams=num_executors * num_rows,
            step_ms=step_s * 1e3,
            tokens_per_s=round(tokens_per_s),
            full=round(tokens_per_s * step_s / (num_executors * num_rows), 3),
            steps_per_s=round(len(periods_ms) / elapsed_s),
            period_ms_p50=percentile(periods_ms, 50),
            period_ms_p99=percentile(periods_ms, 99),
            requests_per_s=round(num_ended / elapsed_s),
            us_per_step=round(used_us / max(len(periods_ms), 1)),
            us_per_token=round(used_us / max(num_tokens, 1), 2),
            us_per_request=round(used_us / max(num_ended, 1)),
            scheduler_cpu=cpu[0],
            executors_cpu=cpu[1],
            load_cpu=cpu[2],
            scheduler_mib=round(used.memory_info().rss / 2**20),
            load_average=round(os.getloadavg()[0], 1),
        )
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _periods_ms(many: subprocess.Popen[str]) -> list[float]:
    """Of the steps since the last time."""
    assert many.stdin is not None
    assert many.stdout is not None
    many.stdin.write("\n")
    many.stdin.flush()
    return [1e3 * period_s for period_s in json.loads(many.stdout.readline())]


def cpu_s(process: psutil.Process) -> float:
    """Seconds of a core that it has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executors", default="1,4,16,64")
    parser.add_argument("--rows", type=int, default=64, help="of each executor")
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--prompt-tokens", type=int, default=LONG.num_prompt_tokens)
    parser.add_argument("--max-tokens", type=int, default=LONG.max_tokens)
    parser.add_argument("--profiler", help="a command in place of the seconds; {pid}: whom")
    arguments = parser.parse_args()
    lengths = Lengths(arguments.prompt_tokens, arguments.max_tokens)
    for num_executors in map(int, arguments.executors.split(",")):
        asyncio.run(
            measure(
                num_executors,
                arguments.rows,
                arguments.step_ms / 1e3,
                arguments.seconds,
                lengths,
                arguments.profiler,
            )
        )


if __name__ == "__main__":
    main()
