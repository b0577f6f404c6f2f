"""Two schedulers, of which one becomes dark: the kernel drops all that is said to it and by it.

It is in a network namespace of its own, with a wire to the one that all else is in. That one is of
this process, which has to be started by `UNSHARE`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import aclosing, suppress
from itertools import pairwise
from pathlib import Path

from executor_service.service import ranked
from splitserve_client import AsyncClient, SamplingParams, SplitserveError, Tokens
from tests.contract.stranger.process import poll
from tests.support.chaos.namespaces import UNSHARE
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.processes import light_executor
from tests.support.processes.forked import ROOT, SOURCE_ROOTS
from tests.support.processes.gate import GATE, Gate

_DARK, _OTHER = "10.77.0.2:50050", "10.77.0.1:50050"
# Either program will do.
_DROP = (
    "(iptables -A INPUT -j DROP && iptables -A OUTPUT -j DROP) || (nft add table inet dark &&"
    " for hook in input output; do nft add chain inet dark $hook"
    ' "{ type filter hook $hook priority 0; policy drop; }"; done)'
)
# Of a token each: streams take 15 s.
_STEP_S = 0.1
_NUM_STREAMS = 8
_PARAMS = SamplingParams(seed=3, max_tokens=150, ignore_eos=True)


def measure(folder: Path) -> dict[str, float]:
    """Seconds until all executors were at the other one, and for which streams paused at most.

    In processes of its own, which write to `folder`.
    """
    command = [*UNSHARE, sys.executable, "-m", "tests.support.chaos.dark_scheduler", str(folder)]
    paths = os.pathsep.join(str(ROOT / root) for root in SOURCE_ROOTS)
    environment = {**os.environ, "PYTHONPATH": paths, GATE: str(folder / "gate")}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


class _Network:
    """The namespace of the scheduler that becomes dark, and the processes on both sides."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        # The shell has its namespace once it says something.
        command = [*UNSHARE, "sh", "-c", "echo; exec sleep infinity"]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._processes.append(holder)
        assert holder.stdout is not None
        holder.stdout.readline()
        self._inside = ["nsenter", "--target", str(holder.pid), "--net"]
        for ours in (
            "ip link set lo up",
            f"ip link add wire type veth peer name eth0 netns {holder.pid}",
            "ip address add 10.77.0.1/30 dev wire",
            "ip link set wire up",
        ):
            subprocess.run(ours.split(), check=True)
        for theirs in (
            "ip address add 10.77.0.2/30 dev eth0",
            "ip link set eth0 up",
            "ip link set lo up",
        ):
            subprocess.run([*self._inside, *theirs.split()], check=True)

    def start(self, name: str, module: str, *options: str, is_inside: bool = False) -> None:
        command = [sys.executable, "-m", module, "--insecure", *options]
        with (self._folder / name).open("wb") as log:
            started = subprocess.Popen(
                [*self._inside, *command] if is_inside else command, stdout=log, stderr=log
            )
        self._processes.append(started)

    def drop_all(self) -> None:
        """From now on no packet gets to the scheduler inside, and none from it."""
        subprocess.run([*self._inside, "sh", "-c", _DROP], check=True, capture_output=True)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def _executor_addresses() -> list[str]:
    """Two of executors that prefer the scheduler that becomes dark, and one of another."""
    left, addresses, port = {_DARK: 2, _OTHER: 1}, list[str](), 51000
    while any(left.values()):
        port += 1
        address = f"10.77.0.1:{port}"
        preferred = ranked((_DARK, _OTHER), address)[0]
        if left[preferred]:
            left[preferred] -= 1
            addresses.append(address)
    return addresses


def _start_all(network: _Network) -> None:
    for address in (_DARK, _OTHER):
        listen = (f"--listen={address}", f"--cluster-listen={address}")
        network.start(address, "scheduler_service", *listen, is_inside=address == _DARK)
    for address in _executor_addresses():
        network.start(
            address,
            light_executor.__name__,
            "--model=light",
            f"--scheduler={_DARK},{_OTHER}",
            f"--listen={address}",
            "--num-host-blocks=0",
            "--move-after-s=0.1",
        )


async def _wait_executors(scheduler: str, count: int) -> None:
    async with AsyncClient(scheduler) as client:

        async def are_there() -> tuple[bool, int]:
            num_connected = 0
            with suppress(SplitserveError):
                executors = (await client.list_executors()).executors
                num_connected = sum(each.is_connected for each in executors)
            return num_connected == count, num_connected

        await poll(are_there)


async def _read(client: AsyncClient, number: int, begun: asyncio.Event) -> float:
    """A stream to its end; returns the longest pause in it."""
    prompt, token_ids, times_s = [5, 6, 7 + number], list[int](), list[float]()
    async with aclosing(client.generate(prompt, _PARAMS)) as events:
        async for event in events:
            if isinstance(event, Tokens):
                begun.set()
                token_ids += event.token_ids
                times_s.append(time.monotonic())
    assert token_ids == list(expected_completions(prompt, _PARAMS)[0].token_ids)
    return max(after - before for before, after in pairwise(times_s))


async def _measure(network: _Network) -> dict[str, float]:
    await _wait_executors(_DARK, 2)
    await _wait_executors(_OTHER, 1)
    # Each begins with any of the two.
    clients = [AsyncClient(f"{_DARK},{_OTHER}") for _ in range(_NUM_STREAMS)]
    begun = [asyncio.Event() for _ in clients]
    reading = [
        asyncio.create_task(_read(client, number, event))
        for number, (client, event) in enumerate(zip(clients, begun, strict=True))
    ]
    for event in begun:
        await event.wait()
    network.drop_all()
    dark_s = time.monotonic()
    await _wait_executors(_OTHER, 3)
    executors_s = time.monotonic() - dark_s
    pauses_s = await asyncio.gather(*reading)
    for client in clients:
        await client.close()
    return {"executors": executors_s, "streams": max(pauses_s)}


def _main(folder: Path) -> None:
    Gate(folder / "gate").slow_down(_STEP_S)
    network = _Network(folder)
    try:
        _start_all(network)
        sys.stdout.write(json.dumps(asyncio.run(_measure(network))))
    finally:
        network.close()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
