"""To which of several schedulers an executor belongs: to one at a time, as long as that answers.

Of those that answer it goes to the one that it prefers. When that is lost, or says nothing while
another one answers, it goes to the next, at once; back only when the one that it prefers more has
answered for a while. For each scheduler it begins another life, with an `executor_epoch` of its
own: whatever the last one still sends is refused, and the epochs of schedulers need not be in
order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from executor_service.service.registration import (
    UNREACHABLE,
    Pacing,
    RegistrationFailed,
    Registry,
    Steadiness,
    ranked,
)
from executor_service.steps.executor_info import ExecutorInfo
from splitserve_rpc.discovery import Discovery
from splitserve_rpc.peer_watch import TICK_S, Ask, PeerState, PeerWatch

# How often it looks for a scheduler that it prefers.
_LOOK_S = 5.0
# One that refuses it, or takes it and never opens a stream, is its last choice for so long.
_PASS_OVER_S = 60.0
_MAX_FRUITLESS = 5
# It takes no more for a moment.
_BUSY = "REGISTRY_BUSY"
# It was sent away, and an operator may take it back: it stays where that would be.
_DRAINED = "EXECUTOR_DRAINED"

_log = logging.getLogger(__name__)


class SchedulerDoor(Registry, Protocol):
    """One scheduler, as executors meet it."""

    async def takes_executors(self) -> bool:
        """Whether it answers, and is not being stopped."""
        ...

    def questions(self) -> AbstractAsyncContextManager[Ask]:
        """Opens a connection over which one asks whether it answers."""

    async def is_answering(self) -> bool:
        """Whether it answers over a new connection, whatever it says."""
        ...


class Lives(Protocol):
    """What an executor is to its scheduler. `is_drained`: one sent it away, and none took it."""

    is_drained: bool

    async def describe(self, scheduler: str) -> ExecutorInfo:
        """The present life, as `scheduler` reaches it. Raises OSError."""
        ...

    async def leave(self, scheduler: str) -> None:
        """Has `scheduler` give it no more work; returns when nothing of it is left, or too slow."""

    def begin_anew(self) -> None:
        """Begins another life, and ends the streams of the last one."""


class Streams(Protocol):
    """Those that schedulers hold open here."""

    @property
    def are_open(self) -> bool:
        """Whether there is one."""

    @property
    def num_batches(self) -> int:
        """What has come over all of them, ever."""

    async def wait_open(self) -> None:
        """Returns when there is one."""

    async def wait_none_open(self) -> None:
        """Returns when there is none."""


class Membership:
    """A Registry: that of the scheduler which `describe` chose last."""

    def __init__(
        self,
        discovery: Discovery,
        name: str,
        door: Callable[[str], SchedulerDoor],
        lives: Lives,
        streams: Streams,
        pacing: Pacing,
        *,
        move_after_s: float,
    ) -> None:
        """`name`: of the executor, by which it prefers. `door`: to the scheduler at an address."""
        self._discovery = discovery
        self._name = name
        self._door = door
        self._lives = lives
        self._streams = streams
        self._pacing = pacing
        self._preference = Steadiness(lambda: move_after_s * (1 + pacing.random()), pacing.clock)
        self._scheduler: str | None = None
        self._is_member = False
        self._num_fruitless = 0
        self._passed_over_until_s: dict[str, float] = {}
        self._changing = asyncio.Lock()
        # Set while its scheduler answers nothing.
        self._is_silent = asyncio.Event()

    @property
    def scheduler(self) -> str | None:
        """The one that it belongs to, or would; None before the first."""
        return self._scheduler

    async def describe(self) -> ExecutorInfo:
        """Chooses a scheduler; what is to be announced there. Raises OSError."""
        async with self._changing:
            chosen = await self._choose(await self._discovery.addresses())
            if chosen != self._scheduler:
                if self._is_member:
                    self._lives.begin_anew()
                self._scheduler, self._is_member, self._num_fruitless = chosen, False, 0
            return await self._lives.describe(chosen)

    async def register(self, info: ExecutorInfo) -> int:
        """Registers where `describe` chose. Raises RegistrationFailed."""
        async with self._changing:
            if self._scheduler is None:
                raise RegistrationFailed(UNREACHABLE, {"problem": "it moves to another scheduler"})
            try:
                epoch = await self._door(self._scheduler).register(info)
            except RegistrationFailed as failure:
                if failure.reason == _DRAINED:
                    self._lives.is_drained = True
                elif failure.reason not in ("", _BUSY):
                    self._pass_over(self._scheduler)
                raise
            self._is_member = True
            # Each time that nobody has opened a stream since the last.
            self._num_fruitless += 1
            if self._num_fruitless > _MAX_FRUITLESS:
                self._pass_over(self._scheduler)
            return epoch

    async def wait_unwatched(self) -> None:
        """Returns when no Execute stream is open."""
        if self._streams.are_open:
            self._num_fruitless, self._lives.is_drained = 0, False
        await self._streams.wait_none_open()

    async def keep_preferred(self) -> None:
        """Moves to a scheduler that it prefers, once that has answered for a while. Never ends."""
        while True:
            await self._pacing.sleep(self._pacing.jittered(_LOOK_S))
            try:
                preferred = await self._preferred()
            except OSError:
                continue  # it is in the log
            if self._preference.is_steady(preferred):
                await self._move(str(preferred))

    async def keep_answered(self) -> None:
        """Leaves a scheduler that says nothing for another one that answers. Never ends.

        While no other does it stays: a scheduler that only paused goes on with what is here.
        """
        while True:
            await self._streams.wait_open()
            if (scheduler := self._scheduler) is None:
                await self._pacing.sleep(TICK_S)
            else:
                await self._watch(scheduler)

    async def _watch(self, scheduler: str) -> None:
        """Returns when this is not its scheduler any more, or has no stream open here."""
        door, streams = self._door(scheduler), self._streams
        async with door.questions() as ask:
            watch = PeerWatch(
                ask,
                door.is_answering,
                lambda: streams.num_batches,
                self._pacing.sleep,
                self._pacing.clock,
            )
            try:
                while streams.are_open and self._scheduler == scheduler:
                    if await watch.tick() is PeerState.SILENT:
                        self._is_silent.set()
                        await self._leave_silent(scheduler, watch)
                    else:
                        self._is_silent.clear()
            finally:
                self._is_silent.clear()
                await watch.close()

    async def _leave_silent(self, silent: str, watch: PeerWatch) -> None:
        """Goes to another scheduler, if one answers and `silent` still does not."""
        try:
            schedulers = await self._discovery.addresses()
        except OSError:
            return  # it is in the log
        others = [each for each in self._order(schedulers) if each != silent]
        answering = await self._first_answering(others)
        async with self._changing:
            is_silent = watch.state is PeerState.SILENT and self._streams.are_open
            if answering is None or self._scheduler != silent or not is_silent:
                return
            _log.warning("scheduler_silent scheduler=%s goes_to=%s", silent, answering)
            # It is asked first when the streams have ended. The silent one is told nothing: it
            # finds another life here should it come back.
            self._scheduler, self._is_member, self._num_fruitless = answering, False, 0
            self._lives.begin_anew()

    async def _first_answering(self, schedulers: Sequence[str]) -> str | None:
        """The first of these that takes executors; all are asked at once."""
        asking = [asyncio.create_task(self._door(each).takes_executors()) for each in schedulers]
        try:
            for scheduler, asked in zip(schedulers, asking, strict=True):
                if await asked:
                    return scheduler
        finally:
            for asked in asking:
                asked.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return None

    async def _move(self, preferred: str) -> None:
        async with self._changing:
            if self._scheduler is None or not self._is_member:
                return
            _log.info("executor_moves scheduler=%s preferred=%s", self._scheduler, preferred)
            await self._leave(self._scheduler)
            self._scheduler, self._is_member = None, False
            self._lives.begin_anew()

    async def _leave(self, scheduler: str) -> None:
        """As `Lives.leave`, but does not wait for a scheduler that answers nothing."""
        leaving = asyncio.create_task(self._lives.leave(scheduler))
        giving_up = asyncio.create_task(self._is_silent.wait())
        try:
            await asyncio.wait({leaving, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                leaving.result()
        finally:
            for task in (leaving, giving_up):
                task.cancel()
            await asyncio.gather(leaving, giving_up, return_exceptions=True)

    async def _choose(self, schedulers: Sequence[str]) -> str:
        """Its own as long as that answers; else the first that does, or the one it prefers."""
        order = self._order(schedulers)
        own = self._scheduler
        if own is not None and own in schedulers and not self._is_passed_over(own):
            order.sort(key=lambda scheduler: scheduler != own)
        if len(order) == 1:
            return order[0]
        if await self._door(order[0]).takes_executors():
            return order[0]
        return await self._first_answering(order[1:]) or order[0]

    async def _preferred(self) -> str | None:
        """One that answers, and that it would rather belong to. Raises OSError."""
        if not self._is_member or self._lives.is_drained:
            return None
        for scheduler in self._order(await self._discovery.addresses()):
            if scheduler == self._scheduler or self._is_passed_over(scheduler):
                return None
            if await self._door(scheduler).takes_executors():
                return scheduler
        return None

    def _order(self, schedulers: Sequence[str]) -> list[str]:
        until_s = self._passed_over_until_s
        self._passed_over_until_s = {s: until_s[s] for s in schedulers if s in until_s}
        order = ranked(schedulers, self._name)
        return sorted(order, key=self._is_passed_over)

    def _pass_over(self, scheduler: str) -> None:
        self._passed_over_until_s[scheduler] = self._pacing.clock() + _PASS_OVER_S

    def _is_passed_over(self, scheduler: str) -> bool:
        return self._pacing.clock() < self._passed_over_until_s.get(scheduler, 0.0)
