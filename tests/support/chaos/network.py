"""The network between a scheduler and its executors: `Network`, and one made of proxies."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from tests.support.processes.addresses import reserve_address
from tests.support.processes.cut_proxy import CutProxy, Way, cut_proxy


class Direction(enum.Enum):
    """As the executor sees it: steps come in, results go out."""

    IN = "in"
    OUT = "out"


BOTH = (Direction.IN, Direction.OUT)


@dataclass(frozen=True, slots=True)
class ExecutorPlace:
    """Where an executor is. `namespace`: of this process it has the network; None: ours."""

    listen: str
    advertise: str
    scheduler: str
    namespace: int | None = None
    options: tuple[str, ...] = ()


class Network(Protocol):
    """Executors by their index. What was made worse is as before after `heal`.

    `cluster_listen`: where the scheduler is to listen for executors. `scheduler_options`: what it
    needs for that.
    """

    @property
    def cluster_listen(self) -> str: ...

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
    """A `CutProxy` each way of dialling, for every executor."""

    scheduler_options = ()

    def __init__(self, cluster_listen: str) -> None:
        self.cluster_listen = cluster_listen
        self._places: list[ExecutorPlace] = []
        # To the executor, and from there to the scheduler.
        self._proxies: list[tuple[CutProxy, CutProxy]] = []

    async def add(self, stack: AsyncExitStack) -> None:
        """Makes room for another executor."""
        listen = reserve_address()
        there = await stack.enter_async_context(cut_proxy(listen))
        back = await stack.enter_async_context(cut_proxy(self.cluster_listen))
        self._places.append(ExecutorPlace(listen, there.address, back.address))
        self._proxies.append((there, back))

    def place(self, index: int) -> ExecutorPlace:
        return self._places[index]

    def _ways(self, index: int, direction: Direction) -> tuple[Way, Way]:
        there, back = self._proxies[index]
        if direction is Direction.IN:
            return there.to_target, back.to_clients
        return there.to_clients, back.to_target

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
        await self._proxies[index][0].listen()

    def executor_ended(self, index: int) -> None:
        self._proxies[index][0].refuse()


@asynccontextmanager
async def proxy_network(num_executors: int) -> AsyncIterator[ProxyNetwork]:
    """For a scheduler on this machine."""
    async with AsyncExitStack() as stack:
        network = ProxyNetwork(reserve_address())
        for _ in range(num_executors):
            await network.add(stack)
        yield network
