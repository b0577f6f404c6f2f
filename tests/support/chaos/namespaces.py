"""A network of network namespaces: the kernel itself loses, cuts and resets what executors say.

It needs a namespace of its own around it, in which it may do as it likes: whoever uses it is
started by `UNSHARE`. Nothing of it is seen outside, and it is gone with its processes.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from executor_service.service import ranked
from tests.support.chaos.network import BOTH, NUM_SCHEDULERS, Direction, ExecutorPlace

UNSHARE = ("unshare", "--net", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")))
_EXECUTOR_PORT = 50050
_SCHEDULER_PORTS = tuple(range(50060, 50060 + NUM_SCHEDULERS))
_TABLE = "inet chaos"
# What the kernel may hand over at once, so that it is not all of it lost.
_BURST_BYTES = 262144


def is_allowed() -> bool:
    """Whether this machine lets us have such namespaces, and rules in them."""
    trial = f"ip link set lo up && nft add table {_TABLE}"
    try:
        tried = subprocess.run([*UNSHARE, "sh", "-c", trial], capture_output=True, check=False)
    except OSError:
        return False
    return tried.returncode == 0


class NamespaceNetwork:
    """A namespace for each executor, with a wire to the one that all else is in."""

    cluster_listens = tuple(f"0.0.0.0:{port}" for port in _SCHEDULER_PORTS)
    scheduler_options = ("--insecure",)

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        _run("ip link set lo up")
        _run(f"nft add table {_TABLE}")
        for hook in ("input", "output"):
            _run(f"nft add chain {_TABLE} {hook} {{ type filter hook {hook} priority 0; }}")

    def add(self) -> None:
        """Makes room for another executor."""
        index = len(self._holders)
        holder = subprocess.Popen(
            [*UNSHARE, "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        holder.stdout.readline()  # now it is there
        ours, theirs = f"10.77.{index}.1/30", f"10.77.{index}.2/30"
        _run(f"ip link add wire{index} type veth peer name eth0 netns {holder.pid}")
        _run(f"ip address add {ours} dev wire{index}")
        _run(f"ip link set wire{index} up")
        for command in (f"address add {theirs} dev eth0", "link set eth0 up", "link set lo up"):
            _run(f"nsenter --target {holder.pid} --net ip {command}")
        for direction, hook, side in _SIDES:
            chain = _chain(index, direction)
            _run(f"nft add chain {_TABLE} {chain}")
            _run(f"nft add rule {_TABLE} {hook} {side} wire{index} jump {chain}")

    def close(self) -> None:
        """Ends what keeps the namespaces."""
        for holder in self._holders:
            holder.kill()
            holder.communicate()

    def place(self, index: int) -> ExecutorPlace:
        schedulers = tuple(f"10.77.{index}.1:{port}" for port in _SCHEDULER_PORTS)
        preferred = schedulers[index % len(schedulers)]
        address = next(
            address
            for port in itertools.count(_EXECUTOR_PORT, -1)
            if ranked(schedulers, address := f"10.77.{index}.2:{port}")[0] == preferred
        )
        holder = self._holders[index].pid
        return ExecutorPlace(address, address, schedulers, holder, ("--insecure",))

    def hold(self, index: int, directions: tuple[Direction, ...]) -> None:
        self._add_rules(index, directions, "drop")

    def delay(self, index: int, seconds: float) -> None:
        _run(f"tc qdisc replace dev wire{index} root netem delay {round(1000 * seconds)}ms")

    def lose(self, index: int, ratio: float) -> None:
        self._add_rules(index, BOTH, f"numgen random mod 1000 < {round(1000 * ratio)} drop")

    def throttle(self, index: int, bytes_per_s: int) -> None:
        limit = f"limit rate over {bytes_per_s} bytes/second burst {_BURST_BYTES} bytes drop"
        self._add_rules(index, BOTH, limit)

    def reset(self, index: int, after_bytes: int) -> None:
        """The executor alone is told; the scheduler has half a connection, and half a message."""
        rule = f"meta l4proto tcp quota over {after_bytes} bytes reject with tcp reset"
        self._add_rules(index, (Direction.OUT,), rule)

    def heal(self, index: int) -> None:
        for direction in BOTH:
            _run(f"nft flush chain {_TABLE} {_chain(index, direction)}")
        remove = f"tc qdisc del dev wire{index} root"
        subprocess.run(remove.split(), stderr=subprocess.DEVNULL, check=False)  # if there is one

    async def executor_began(self, index: int) -> None:
        """The kernel knows."""

    def executor_ended(self, index: int) -> None:
        """The kernel refuses."""

    @staticmethod
    def _add_rules(index: int, directions: tuple[Direction, ...], rule: str) -> None:
        for direction in directions:
            _run(f"nft add rule {_TABLE} {_chain(index, direction)} {rule}")


# What comes out of an executor goes into where the scheduler is.
_SIDES = ((Direction.OUT, "input", "iifname"), (Direction.IN, "output", "oifname"))


def _chain(index: int, direction: Direction) -> str:
    return f"{direction.value}_{index}"


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def namespace_network(num_executors: int) -> Iterator[NamespaceNetwork]:
    """For schedulers in this namespace, which nobody else uses."""
    network = NamespaceNetwork()
    try:
        for _ in range(num_executors):
            network.add()
        yield network
    finally:
        network.close()
