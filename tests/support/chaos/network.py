"""The network between schedulers and executors: `Network`, and one made of proxies."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from executor_service.service import ranked
from tests.support.processes.addresses import reserve_address
from tests.support.processes.cut_proxy import CutProxy, Way, cut_proxy

NUM_SCHEDULERS = 2


def with_preferred(schedulers: Sequence[str], executor: str, index: int) -> list[str]:
    """`schedulers` in an order in which `executor`, which has this index, prefers its own."""
    first = ranked(schedulers, executor)[0]
    others = [address for address in schedulers if address != first]
    place = index % len(schedulers)
    return [*others[:place], first, *others[place:]]


class Direction(enum.Enum):
    """As the executor sees it: steps come in, results go out."""

    IN = "in"
    OUT = "out"


BOTH = (Direction.IN, Direction.OUT)


@dataclass(frozen=True, slots=True)
class ExecutorPlace:
    """Addresses of an executor, and of the `schedulers` as it reaches them, by their index.

    `namespace`: the pid of the process whose network it has; None: ours.
    """

    listen: str
    advertise: str
    schedulers: tuple[str, ...]
    namespace: int | None = None
    options: tuple[str, ...] = ()


class Network(Protocol):
    """Executors by their index. What was made worse is as before after `heal`.

    `cluster_listens`: where each scheduler is to listen for executors. `scheduler_options`: what
    schedulers need for that. Executor i prefers scheduler i, modulo their number.
    """

    @property
    def cluster_listens(self) -> tuple[str, ...]: ...

    @property
    def scheduler_options(self) -> tuple[str, ...]: ...

    def place(self, index: int) -> ExecutorPlace:
        """Where the executor is."""
        ...

    def hold(self, index: int, directions: tuple[Direction, ...]) -> None:
        """Nothing gets through; nobody is told."""

    def delay(self, index: int, seconds: float) -> None:
        """Everything comes late, both ways."""

    def lose(self, index: int, ratio: float) -> None:
        """Some of it has to be sent again, both ways."""

    def throttle(self, index: int, bytes_per_s: int) -> None:
        """No more than so much gets through, each way."""

    def reset(self, index: int, after_bytes: int) -> None:
        """Resets connections once so many bytes of results have come through."""

    def heal(self, index: int) -> None:
        """Everything gets through."""

    async def executor_began(self, index: int) -> None:
        """Somebody listens there."""

    def executor_ended(self, index: int) -> None:
        """Nobody does."""


class ProxyNetwork:
    """A `CutProxy` each way of dialling, for every executor and scheduler."""

    scheduler_options = ()

    def __init__(self, cluster_listens: tuple[str, ...]) -> None:
        self.cluster_listens = cluster_listens
        self._places: list[ExecutorPlace] = []
        # To the executor, and from there to each scheduler.
        self._there: list[CutProxy] = []
        self._back: list[tuple[CutProxy, ...]] = []

    async def add(self, stack: AsyncExitStack) -> None:
        """Makes room for another executor."""
        listen = reserve_address()
        there = await stack.enter_async_context(cut_proxy(listen))
        addresses = with_preferred(
            [reserve_address() for _ in self.cluster_listens], there.address, len(self._places)
        )
        back = []
        for address, target in zip(addresses, self.cluster_listens, strict=True):
            back.append(await stack.enter_async_context(cut_proxy(target, address)))
        self._places.append(ExecutorPlace(listen, there.address, tuple(addresses)))
        self._there.append(there)
        self._back.append(tuple(back))

    def place(self, index: int) -> ExecutorPlace:
        return self._places[index]

    def _ways(self, index: int, direction: Direction) -> tuple[Way, ...]:
        there, back = self._there[index], self._back[index]
        if direction is Direction.IN:
            return (there.to_target, *(proxy.to_clients for proxy in back))
        return (there.to_clients, *(proxy.to_target for proxy in back))

    def _all_ways(self, index: int) -> tuple[Way, ...]:
        return tuple(way for direction in BOTH for way in self._ways(index, direction))

    def hold(self, index: int, directions: tuple[Direction, ...]) -> None:
        for direction in directions:
            for way in self._ways(index, direction):
                way.hold()

    def delay(self, index: int, seconds: float) -> None:
        for way in self._all_ways(index):
            way.delay_s = seconds

    def lose(self, index: int, ratio: float) -> None:
        for way in self._all_ways(index):
            way.loss_ratio = ratio

    def throttle(self, index: int, bytes_per_s: int) -> None:
        for way in self._all_ways(index):
            way.bytes_per_s = bytes_per_s

    def reset(self, index: int, after_bytes: int) -> None:
        self._ways(index, Direction.OUT)[0].cut_after_bytes = after_bytes

    def heal(self, index: int) -> None:
        for way in self._all_ways(index):
            way.delay_s, way.loss_ratio, way.bytes_per_s = 0.0, 0.0, float("inf")
            way.cut_after_bytes = None
            way.release()

    async def executor_began(self, index: int) -> None:
        await self._there[index].listen()

    def executor_ended(self, index: int) -> None:
        self._there[index].refuse()


@asynccontextmanager
async def proxy_network(
    num_executors: int, num_schedulers: int = NUM_SCHEDULERS
) -> AsyncIterator[ProxyNetwork]:
    """For schedulers on this machine."""
    async with AsyncExitStack() as stack:
        network = ProxyNetwork(tuple(reserve_address() for _ in range(num_schedulers)))
        for _ in range(num_executors):
            await network.add(stack)
        yield network
