"""Executors on their way out: what runs there may end, what does not moves, and they are gone."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from scheduler_service.core.request import Request
from scheduler_service.executors.engine_loop import EngineLoop
from scheduler_service.executors.executor_link import ExecutorLost
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_rpc.domain_error import DomainError

MAX_TIMEOUT_S = 3600.0
# Lives of executors that may not come back.
_MAX_REMEMBERED = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drained:
    """How a drain ended. `num_moved`: requests that go on elsewhere. `is_undone`: it stays."""

    num_moved: int = 0
    is_lost: bool = False
    is_undone: bool = False


@dataclass(slots=True)
class _Drain:
    over: asyncio.Future[Drained]
    num_moved: int = 0
    is_own_wish: bool = False
    alarm: asyncio.TimerHandle | None = field(default=None)

    def end(self, drained: Drained) -> None:
        """Whoever waits is told."""
        if self.alarm is not None:
            self.alarm.cancel()
        self.over.set_result(drained)


class Drains:
    """The drains under way, by engine, and whose life is over by one."""

    def __init__(
        self,
        take_back: Callable[[EngineLoop, list[Request]], None],
        remove: Callable[[EngineLoop], None],
    ) -> None:
        """`take_back`: sees to requests that an engine gave away; `remove`: closes an engine.

        Whoever closes one, for whatever reason, calls `gone`.
        """
        self._take_back = take_back
        self._remove = remove
        self._drains: dict[EngineLoop, _Drain] = {}
        self._ended_lives: OrderedDict[str, int] = OrderedDict()
        # Of these, those that were taken back and have not come yet.
        self._welcome: OrderedDict[str, int] = OrderedDict()

    def begin(
        self, engine: EngineLoop, timeout_s: float, *, is_own_wish: bool = False
    ) -> asyncio.Future[Drained]:
        """Drains an engine; what runs there has `timeout_s`, or less if it had less before.

        `is_own_wish`: its executor is about to end. Cancelling what is returned changes nothing.
        """
        loop = asyncio.get_running_loop()
        drain = self._drains.get(engine)
        if drain is None:
            drain = self._drains[engine] = _Drain(loop.create_future())
            self._begin(engine, drain, timeout_s)
        drain.is_own_wish |= is_own_wish
        ends_at = loop.time() + timeout_s
        if drain.alarm is None or ends_at < drain.alarm.when():
            if drain.alarm is not None:
                drain.alarm.cancel()
            drain.alarm = loop.call_at(ends_at, self._time_is_up, engine)
        loop.call_soon(self._look, engine)
        return asyncio.shield(drain.over)

    def _begin(self, engine: EngineLoop, drain: _Drain, timeout_s: float) -> None:
        info, core = engine.link.info, engine.scheduler
        self._end_life(info)
        _log.info(
            "executor_leaving address=%s num_requests=%d timeout_s=%g",
            info.address,
            core.num_unfinished,
            timeout_s,
        )
        engine.is_draining = True
        self._move(engine, drain, core.queued_request_ids)

    def request_ended(self, engine: EngineLoop) -> None:
        """One of the engine's requests is over; perhaps it was the last."""
        if engine in self._drains:
            # Not now: its core is still telling what a step brought.
            asyncio.get_running_loop().call_soon(self._look, engine)

    def gone(self, engine: EngineLoop, *, is_lost: bool) -> None:
        """The engine was closed."""
        drain = self._drains.pop(engine, None)
        if drain is not None:
            drain.end(Drained(drain.num_moved, is_lost))

    def undo(self, engine: EngineLoop) -> bool:
        """Keeps an engine that drains; False: it does not. Raises DomainError(EXECUTOR_LEAVES)."""
        drain = self._drains.get(engine)
        if drain is None:
            return False
        address = engine.link.info.address
        if drain.is_own_wish:
            raise DomainError("EXECUTOR_LEAVES", f"the executor at {address} is about to end")
        del self._drains[engine]
        self.welcome(address)
        engine.is_draining = False
        _log.info("executor_stays address=%s", address)
        drain.end(Drained(drain.num_moved, is_undone=True))
        return True

    def is_over(self, address: str) -> bool:
        """Whether the latest life that was drained at `address` is remembered."""
        return address in self._ended_lives

    def welcome(self, address: str) -> bool:
        """The life that was sent away from `address` may come back; False: none is remembered."""
        epoch = self._ended_lives.pop(address, None)
        if epoch is not None:
            _remember(self._welcome, address, epoch)
        return epoch is not None or address in self._welcome

    def check(self, info: executor.ExecutorInfo, *, says_drained: bool = False) -> None:
        """Raises DomainError(EXECUTOR_DRAINED) for a life that was sent away.

        `says_drained`: by itself, from a scheduler that was here before, or from another.
        """
        if says_drained and self._welcome.get(info.address) != info.executor_epoch:
            self._end_life(info)
        if self._ended_lives.get(info.address) == info.executor_epoch:
            raise DomainError(
                "EXECUTOR_DRAINED",
                f"executor_epoch {info.executor_epoch} at {info.address} was drained; "
                "a process that is started anew is taken",
            )

    def _end_life(self, info: executor.ExecutorInfo) -> None:
        self._welcome.pop(info.address, None)
        _remember(self._ended_lives, info.address, info.executor_epoch)

    def _look(self, engine: EngineLoop) -> None:
        if engine in self._drains and engine.scheduler.num_unfinished == 0:
            self._remove(engine)

    def _time_is_up(self, engine: EngineLoop) -> None:
        self._move(engine, self._drains[engine], engine.scheduler.unfinished_request_ids)
        if engine in self._drains:
            self._remove(engine)

    def _move(self, engine: EngineLoop, drain: _Drain, request_ids: Sequence[str]) -> None:
        moved: list[Request] = []
        with suppress(ExecutorLost):  # its core broke, and all that it has comes back
            for request_id in request_ids:
                request = engine.withdraw(request_id)
                if request is not None:
                    moved.append(request)
        drain.num_moved += len(moved)
        self._take_back(engine, moved)


def _remember(lives: OrderedDict[str, int], address: str, executor_epoch: int) -> None:
    lives[address] = executor_epoch
    lives.move_to_end(address)
    while len(lives) > _MAX_REMEMBERED:
        lives.popitem(last=False)
