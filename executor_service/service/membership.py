"""Membership of an executor in one of several schedulers.

The executor joins the scheduler that it prefers among those that answer. When this one is lost, or
stays silent while another answers, the executor changes to the next one at once. It returns only
when a scheduler that it prefers more has answered for a while. For each scheduler the executor
begins another life with an `executor_epoch` of its own. So batches of the last scheduler are
refused, and the epochs of schedulers need not be in order.
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
    StabilityDetector,
    ranked,
)
from executor_service.steps import ExecutorInfo
from splitserve_common import Discovery
from splitserve_rpc import TICK_S, Ask, PeerState, PeerWatch

# Interval of checks for a preferred scheduler.
_LOOK_S = 5.0
# Time for which a scheduler is the last choice, after it refused the executor, or registered it
# _MAX_FRUITLESS times without opening a stream.
_PASS_OVER_S = 60.0
_MAX_FRUITLESS = 5
# The scheduler accepts no executor for a moment.
_BUSY = "REGISTRY_BUSY"
# The executor was drained, and an operator may take it back: it stays with this scheduler.
_DRAINED = "EXECUTOR_DRAINED"

_log = logging.getLogger(__name__)


class SchedulerConnection(Registry, Protocol):
    """Connection to one scheduler, as executors use it."""

    async def takes_executors(self) -> bool:
        """Returns whether the scheduler answers and is not being stopped."""
        ...

    def questions(self) -> AbstractAsyncContextManager[Ask]:
        """Opens a connection for asking repeatedly whether the scheduler answers."""

    async def is_answering(self) -> bool:
        """Returns whether the scheduler sends any answer over a new connection."""
        ...


class Lives(Protocol):
    """Lives of the executor. `is_drained`: drained by a scheduler and accepted by none since."""

    is_drained: bool

    async def describe(self, scheduler: str) -> ExecutorInfo:
        """Returns the current life with the address for `scheduler`. Raises OSError."""
        ...

    async def leave(self, scheduler: str) -> None:
        """Asks `scheduler` to withdraw its work; returns when none is left, or at a timeout."""

    def begin_anew(self) -> None:
        """Begins another life, and ends the streams of the last one."""


class Streams(Protocol):
    """Execute streams that schedulers have opened here."""

    @property
    def are_open(self) -> bool:
        """Whether any stream is open."""

    @property
    def num_batches(self) -> int:
        """Number of batches received over all streams since the start."""

    async def wait_open(self) -> None:
        """Returns when a stream is open."""

    async def wait_none_open(self) -> None:
        """Returns when no stream is open."""


class Membership:
    """Registry of the scheduler that `describe` chose last."""

    def __init__(
        self,
        discovery: Discovery,
        name: str,
        door: Callable[[str], SchedulerConnection],
        lives: Lives,
        streams: Streams,
        pacing: Pacing,
        *,
        move_after_s: float,
    ) -> None:
        """`name`: the executor's, for its preference. `door`: connects to a scheduler's address."""
        self._discovery = discovery
        self._name = name
        self._door = door
        self._lives = lives
        self._streams = streams
        self._pacing = pacing
        self._preference = StabilityDetector(
            lambda: move_after_s * (1 + pacing.random()), pacing.clock
        )
        self._scheduler: str | None = None
        self._is_member = False
        self._num_fruitless = 0
        self._passed_over_until_s: dict[str, float] = {}
        self._changing = asyncio.Lock()
        # Set while the scheduler is silent.
        self._is_silent = asyncio.Event()

    @property
    def scheduler(self) -> str | None:
        """Scheduler that the executor belongs to or tries to join; None before the first choice."""
        return self._scheduler

    async def describe(self) -> ExecutorInfo:
        """Chooses a scheduler; returns the info to announce there. Raises OSError."""
        async with self._changing:
            chosen = await self._choose(await self._discovery.addresses())
            if chosen != self._scheduler:
                if self._is_member:
                    self._lives.begin_anew()
                self._scheduler, self._is_member, self._num_fruitless = chosen, False, 0
            return await self._lives.describe(chosen)

    async def register(self, info: ExecutorInfo) -> int:
        """Registers with the scheduler that `describe` chose. Raises RegistrationFailed."""
        async with self._changing:
            if self._scheduler is None:
                raise RegistrationFailed(
                    UNREACHABLE, {"problem": "the executor is moving to another scheduler"}
                )
            try:
                epoch = await self._door(self._scheduler).register(info)
            except RegistrationFailed as failure:
                if failure.reason == _DRAINED:
                    self._lives.is_drained = True
                elif failure.reason not in ("", _BUSY):
                    self._pass_over(self._scheduler)
                raise
            self._is_member = True
            # Registrations since the last open stream.
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
        """Moves to a preferred scheduler once it has answered for a while. Runs until cancelled."""
        while True:
            await self._pacing.sleep(self._pacing.jittered(_LOOK_S))
            try:
                preferred = await self._preferred()
            except OSError:
                continue  # logged already
            if self._preference.is_steady(preferred):
                await self._move(str(preferred))

    async def keep_answered(self) -> None:
        """Changes from a silent scheduler to one that answers. Runs until cancelled.

        If no other scheduler answers, the executor stays: a scheduler that only paused can go on.
        """
        while True:
            await self._streams.wait_open()
            if (scheduler := self._scheduler) is None:
                await self._pacing.sleep(TICK_S)
            else:
                await self._watch(scheduler)

    async def _watch(self, scheduler: str) -> None:
        """Watches `scheduler` while it is the current one and has a stream open here."""
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
        """Changes to another scheduler, if one answers and `silent` is still silent."""
        try:
            schedulers = await self._discovery.addresses()
        except OSError:
            return  # logged already
        others = [each for each in self._order(schedulers) if each != silent]
        answering = await self._first_answering(others)
        async with self._changing:
            is_silent = watch.state is PeerState.SILENT and self._streams.are_open
            if answering is None or self._scheduler != silent or not is_silent:
                return
            _log.warning("scheduler_silent scheduler=%s goes_to=%s", silent, answering)
            # The new scheduler is asked first once the streams have ended. The silent one is not
            # told: if it comes back, it finds another life here.
            self._scheduler, self._is_member, self._num_fruitless = answering, False, 0
            self._lives.begin_anew()

    async def _first_answering(self, schedulers: Sequence[str]) -> str | None:
        """Returns the first of `schedulers` that accepts executors; queries all concurrently."""
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
        """Leaves as `Lives.leave` does, but does not wait for a scheduler that is silent."""
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
        """Returns the current scheduler if it answers, else the first of the order that answers.

        If no scheduler answers, returns the first of the order.
        """
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
        """Returns a scheduler that answers and is preferred to the current one. Raises OSError."""
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
