"""What streams see of an executor that is lost: the pause until their next token.

`make bench BENCH=recovery ARGS="--losses 20"`. Real processes: a scheduler, two executors without a
model, whose steps take 10 ms, and some streams. One executor is killed (SIGKILL) or stopped
(SIGSTOP), and another one started in its place, again and again. A pause is counted for each stream
that ran there: from the loss to its next token, which is computed again. `step_ms`: what a token
took before.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.report import emit, percentile
from splitserve_client import AsyncClient, SamplingParams, Tokens
from tests.support.processes.processes import Processes, processes

_PARAMS = SamplingParams(temperature=1.0, seed=1, max_tokens=1000, ignore_eos=True)
_STEP_S = 0.01
_NUM_TOKENS_BEFORE = 30


class _Streams:
    """Streams without an end; when each got its tokens."""

    def __init__(self, client: AsyncClient, num_streams: int) -> None:
        self.times_s: list[list[float]] = [[] for _ in range(num_streams)]
        self._changed = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._run(client, index)) for index in range(num_streams)
        ]

    async def _run(self, client: AsyncClient, index: int) -> None:
        while True:
            async for event in client.generate([5, 6, 7 + index], _PARAMS):
                if isinstance(event, Tokens):
                    self.times_s[index].append(time.perf_counter())
                    self._changed.set()

    async def all_got(self, num_tokens: int, since_s: float) -> None:
        """Returns when each has so many tokens that came after `since_s`."""
        while min(sum(at > since_s for at in times) for times in self.times_s) < num_tokens:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


async def add_executor(running: Processes) -> None:
    """Starts one more, and waits for it."""
    known = running.executors.keys()
    command = [sys.executable, "-m", "benchmarks.letters_executor", running.address, str(_STEP_S)]
    process = _start(command)
    found = await running.wait_until(lambda all_: len({e.address for e in all_} - known) == 1)
    [address] = {executor.address for executor in found} - known
    running.executors[address] = process


async def lose(running: Processes, streams: _Streams, loss: str) -> tuple[list[float], float]:
    """The pauses of the streams that were hit by a loss, and what a token took before it."""
    await streams.all_got(_NUM_TOKENS_BEFORE, time.perf_counter())
    executors = await running.wait_until(lambda found: len(found) == 2)
    victim = max(executors, key=lambda executor: executor.num_running_requests).address
    lost_s = time.perf_counter()
    if loss == "kill":
        running.kill_executor(victim)
    else:
        running.pause_executor(victim)
    await streams.all_got(2, lost_s)
    pauses_s: list[float] = []
    steps_s: list[float] = []
    for times in streams.times_s:
        before = [at for at in times if at <= lost_s][-_NUM_TOKENS_BEFORE:]
        # A token that was on its way came from the lost one.
        after = [at for at in times if at > lost_s - 0.001]
        gaps = [two - one for one, two in pairwise([before[-1], *after])]
        steps_s.append((before[-1] - before[0]) / (len(before) - 1))
        pauses_s.append(max(gaps))
    if loss == "stop":
        running.kill_executor(victim)
    await add_executor(running)
    return pauses_s, sum(steps_s) / len(steps_s)


async def measure(loss: str, num_losses: int, num_streams: int, patience_s: float) -> None:
    """Prints what all pauses were. `patience_s`: of the scheduler, as its option."""
    with (
        tempfile.TemporaryDirectory() as folder,
        processes(Path(folder)) as running,
    ):
        running.start_scheduler("--step-patience-s", str(patience_s))
        for _ in range(2):
            await add_executor(running)
        async with AsyncClient(running.address) as client:
            streams = _Streams(client, num_streams)
            pauses_ms: list[float] = []
            step_ms: list[float] = []
            for _ in range(num_losses):
                pauses_s, step_s = await lose(running, streams, loss)
                # Streams of the other executor went on.
                hit = sorted(pauses_s)[-max(1, num_streams // 2) :]
                pauses_ms += [1000 * pause_s for pause_s in hit]
                step_ms.append(1000 * step_s)
            await streams.close()
    emit(
        "recovery",
        loss=loss,
        losses=num_losses,
        streams=num_streams,
        patience_s=patience_s,
        pause_ms_p50=round(percentile(pauses_ms, 50)),
        pause_ms_p99=round(percentile(pauses_ms, 99)),
        step_ms=round(percentile(step_ms, 50), 1),
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=20)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--loss", choices=("kill", "stop"), nargs="*", default=("kill", "stop"))
    parser.add_argument("--step-patience-s", type=float, default=3.0)
    arguments = parser.parse_args()
    for loss in arguments.loss:
        asyncio.run(measure(loss, arguments.losses, arguments.streams, arguments.step_patience_s))


if __name__ == "__main__":
    main()
