"""How long streams pause, fault by fault: `python -m tests.chaos.measure`, `--write` for README.md.

A pause is the longest time without a token since the fault. Of 64 greedy streams those count that
the fault concerned: as many, of those that paused longest, as ran on its victims; all, where the
victim is the scheduler.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from splitserve_client import AsyncClient, Tokens
from tests.support.chaos.asks import GREEDY
from tests.support.chaos.faults import FAULTS, End, Fault
from tests.support.chaos.load import NUM_STREAMS
from tests.support.chaos.network import proxy_network
from tests.support.chaos.stack import Stack, running_stack

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
_PARAMS = replace(GREEDY, max_tokens=200)
_TOKENS_BEFORE = 20
# One executor has room for all.
_NUM_DEVICE_BLOCKS = 1024
_LONGEST_FAULT_S = 8.0
_STARTS = ("executor", "two", "all executors", "network", "stream")
# The others concern no stream of the Python client, or their own request, or last as long as they
# are told to.
_KINDS = {kind: draw for kind, draw in FAULTS.items() if kind.startswith(_STARTS)}
# Its streams wait for it: there is no other.
_KINDS["scheduler killed"] = lambda _: End(("scheduler-0",))


@dataclass(slots=True)
class TimedStream:
    """A completion, and when its tokens came."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: AsyncClient) -> None:
        async with aclosing(client.generate(self.prompt, _PARAMS)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    self.tokens += event.token_ids
                    self.times_s.append(time.monotonic())
                    if len(self.tokens) >= _TOKENS_BEFORE:
                        self.began.set()

    def pause_s(self, since_s: float) -> float:
        """The longest gap after that; what is before it does not count."""
        gaps = (b - max(a, since_s) for a, b in pairwise(self.times_s) if b > since_s)
        return max(gaps, default=0.0)


@dataclass(slots=True)
class Measured:
    """Of one kind of fault, over all times that it happened."""

    pauses_s: list[float] = field(default_factory=list)
    num_streams: int = 0
    num_equal: int = 0

    def row(self, kind: str) -> str:
        """A line of the table."""
        outcome = f"{self.num_equal} of {self.num_streams} streams as undisturbed"
        if not self.pauses_s:
            return f"| {kind} | {outcome} | 0 | | | |"
        p50, p99 = np.percentile(self.pauses_s, [50, 99])
        longest = max(self.pauses_s)
        return (
            f"| {kind} | {outcome} | {len(self.pauses_s)} | {p50:.2f} | {p99:.2f} | {longest:.2f} |"
        )


async def measure(stack: Stack, fault: Fault, truth: list[list[int]], measured: Measured) -> None:
    """Lets `fault` happen once while all streams run."""
    streams = _streams()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(stream.run(stack.clients[0])) for stream in streams]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        num_concerned = await _num_concerned(stack, fault)
        began_s = time.monotonic()
        await fault.begin(stack)
        if not _lets_others_go_on(fault):
            await fault.end(stack)
        await asyncio.wait(running, timeout=_LONGEST_FAULT_S)
        if _lets_others_go_on(fault):
            await fault.end(stack)
    pauses = sorted(stream.pause_s(began_s) for stream in streams)
    measured.pauses_s += pauses[len(pauses) - num_concerned :]
    measured.num_streams += len(streams)
    measured.num_equal += sum(s.tokens == t for s, t in zip(streams, truth, strict=True))
    await stack.start_missing()
    await stack.wait_ready()


def _streams() -> list[TimedStream]:
    return [TimedStream((1, 4, 300 + index)) for index in range(NUM_STREAMS)]


def _lets_others_go_on(fault: Fault) -> bool:
    return len(fault.victims) < 3 and "scheduler-0" not in fault.victims


async def _num_concerned(stack: Stack, fault: Fault) -> int:
    if not _lets_others_go_on(fault):
        return NUM_STREAMS
    indexes = [stack.executor_names.index(name) for name in fault.victims]
    addresses = {stack.network.place(index).advertise for index in indexes}
    (listed,) = await stack.executor_lists()
    return sum(e.num_running_requests for e in listed.executors if e.address in addresses)


async def measure_all(num_times: int) -> str:
    """The table."""
    rows = [
        "| fault | outcome | concerned | p50 s | p99 s | longest s |",
        "|---|---|---:|---:|---:|---:|",
    ]
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            proxy_network(3, num_schedulers=1) as network,
            running_stack(network, Path(folder), num_device_blocks=_NUM_DEVICE_BLOCKS) as stack,
        ):
            undisturbed = _streams()
            await asyncio.gather(*(stream.run(stack.clients[0]) for stream in undisturbed))
            truth = [stream.tokens for stream in undisturbed]
            for kind, draw in _KINDS.items():
                measured = Measured()
                for _ in range(num_times):
                    await measure(stack, draw(rng), truth, measured)
                rows.append(measured.row(kind))
                sys.stderr.write(rows[-1] + "\n")
    return "\n".join(rows)


def main() -> int:
    """Prints the table, or writes it into README.md."""
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="how often each fault happens")
    parser.add_argument("--write", action="store_true", help="write the table into README.md")
    given = parser.parse_args()
    table = asyncio.run(measure_all(given.times))
    if given.write:
        text = README.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        README.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    else:
        sys.stdout.write(table + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
