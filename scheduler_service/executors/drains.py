"""Drains of executors: their deadlines and outcomes, and the drained lives that may not return."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_contract import DomainError

MAX_TIMEOUT_S = 3600.0
# Limit of remembered lives, of each kind.
_MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Drained:
    """Outcome of a drain.

    `num_moved`: requests that go on at other executors. `is_lost`: the executor was lost before it
    was drained. `is_undone`: the executor was taken back.
    """

    num_moved: int = 0
    is_lost: bool = False
    is_undone: bool = False


@dataclass(slots=True)
class _Drain:
    over: asyncio.Future[Drained]
    is_own_wish: bool = False
    alarm: asyncio.TimerHandle | None = None

    def end(self, drained: Drained) -> None:
        """Stops the alarm, and hands `drained` to the waiting callers."""
        if self.alarm is not None:
            self.alarm.cancel()
        if not self.over.done():
            self.over.set_result(drained)


class Drains:
    """Drains in progress, by address, and the lives of executors that were drained."""

    def __init__(self) -> None:
        self._drains: dict[str, _Drain] = {}
        self._ended_lives: OrderedDict[str, int] = OrderedDict()
        # Drained lives that may register again, but have not yet done so.
        self._welcome: OrderedDict[str, int] = OrderedDict()

    def begin(
        self,
        info: executor.ExecutorInfo,
        timeout_s: float,
        expired: Callable[[str], None],
        *,
        is_own_wish: bool = False,
    ) -> tuple[asyncio.Future[Drained], bool]:
        """Begins a drain, or joins the one in progress.

        Returns a future of its outcome, and whether the drain is new. After `timeout_s` seconds
        `expired` is called with the address; a drain in progress keeps its deadline if that is
        earlier. `is_own_wish`: the executor itself is about to exit. Cancelling the future does not
        cancel the drain.
        """
        loop = asyncio.get_running_loop()
        drain = self._drains.get(info.address)
        is_new = drain is None
        if drain is None:
            drain = self._drains[info.address] = _Drain(loop.create_future())
            self._end_life(info)
        drain.is_own_wish |= is_own_wish
        ends_at = loop.time() + timeout_s
        if drain.alarm is None or ends_at < drain.alarm.when():
            if drain.alarm is not None:
                drain.alarm.cancel()
            drain.alarm = loop.call_at(ends_at, expired, info.address)
        return asyncio.shield(drain.over), is_new

    def gone(self, address: str, *, num_moved: int, is_lost: bool) -> None:
        """Ends the drain of an executor that was removed, if it had one."""
        drain = self._drains.pop(address, None)
        if drain is not None:
            drain.end(Drained(num_moved, is_lost))

    def undo(self, address: str, num_moved: int) -> bool:
        """Undoes the drain of an executor; returns False if the executor does not drain.

        Raises DomainError(EXECUTOR_LEAVES) if the executor itself is about to exit.
        """
        drain = self._drains.get(address)
        if drain is None:
            return False
        if drain.is_own_wish:
            raise DomainError("EXECUTOR_LEAVES", f"the executor at {address} is shutting down")
        del self._drains[address]
        self.welcome(address)
        drain.end(Drained(num_moved, is_undone=True))
        return True

    def is_over(self, address: str) -> bool:
        """Returns whether a drained life at `address` is remembered."""
        return address in self._ended_lives

    def welcome(self, address: str) -> bool:
        """Allows the drained life at `address` to register again; False if none is remembered."""
        epoch = self._ended_lives.pop(address, None)
        if epoch is not None:
            _remember(self._welcome, address, epoch)
        return epoch is not None or address in self._welcome

    def check(self, info: executor.ExecutorInfo, *, says_drained: bool = False) -> None:
        """Raises DomainError(EXECUTOR_DRAINED) for a life that was drained.

        `says_drained`: the executor says so itself, after a drain by an earlier scheduler process
        or by another scheduler.
        """
        if says_drained and self._welcome.get(info.address) != info.executor_epoch:
            self._end_life(info)
        if self._ended_lives.get(info.address) == info.executor_epoch:
            raise DomainError(
                "EXECUTOR_DRAINED",
                f"executor_epoch {info.executor_epoch} at {info.address} was drained; "
                "restart the process to register it again",
            )

    def _end_life(self, info: executor.ExecutorInfo) -> None:
        self._welcome.pop(info.address, None)
        _remember(self._ended_lives, info.address, info.executor_epoch)


def _remember(lives: OrderedDict[str, int], address: str, executor_epoch: int) -> None:
    lives[address] = executor_epoch
    lives.move_to_end(address)
    while len(lives) > _MAX_REMEMBERED:
        lives.popitem(last=False)
