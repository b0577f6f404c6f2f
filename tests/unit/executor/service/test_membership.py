"""A Registrar and a Membership among schedulers that come and go, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from executor_service.service import (
    UNREACHABLE,
    Membership,
    Pacing,
    Registrar,
    RegistrationFailed,
    ranked,
)
from executor_service.steps import ExecutorInfo
from splitserve_rpc import Ask
from tests.support.steps.step_driver import make_executor_info

EXECUTOR = "10.1.0.1:50052"
FIRST, SECOND, THIRD = ranked(["a:1", "b:1", "c:1"], EXECUTOR)
INFO = make_executor_info(vocab_size=10, max_model_len=10)
HOLD_S = 30.0


@dataclass
class World:
    """Schedulers at addresses, and the executor as they see it. It sleeps only in virtual time."""

    schedulers: tuple[str, ...] = (FIRST, SECOND)
    up: set[str] = field(default_factory=set)
    # Those that take it, and cannot reach it.
    blind: set[str] = field(default_factory=set)
    refusing: dict[str, str] = field(default_factory=dict)
    # Those that hold their connections and streams, and answer nothing.
    silent: set[str] = field(default_factory=set)
    epochs: dict[str, int] = field(default_factory=lambda: {FIRST: 100, SECOND: 50, THIRD: 70})
    info: ExecutorInfo = INFO
    is_drained: bool = False
    # What happened, in order.
    events: list[tuple[object, ...]] = field(default_factory=list)
    owner: str | None = None
    host: str | None = None
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.sleeping: list[tuple[float, asyncio.Future[None]]] = []
        self.unwatched = asyncio.Event()
        self.unwatched.set()
        self.watched = asyncio.Event()
        self.num_batches = 0
        # Held until the scheduler has let go of it; None: it does at once.
        self.leaving: asyncio.Future[None] | None = None
        pacing = Pacing(self.sleep, lambda: 0.5, lambda: 0, lambda: self.now_s)
        self.membership = Membership(
            self,
            EXECUTOR,
            lambda address: _Door(self, address),
            self,
            self,
            pacing,
            move_after_s=HOLD_S,
        )
        self.registrar = Registrar(
            self.membership,
            self.membership.describe,
            self.membership.wait_unwatched,
            lambda epoch: self.events.append(("adopted", epoch)),
            pacing,
        )

    # -- discovery ---------------------------------------------------------------------------------

    async def addresses(self) -> tuple[str, ...]:
        if not self.schedulers:
            raise OSError("no such name")
        return self.schedulers

    # -- lives -------------------------------------------------------------------------------------

    async def describe(self, scheduler: str) -> ExecutorInfo:
        return self.info

    async def leave(self, scheduler: str) -> None:
        self.events.append(("leaves", scheduler))
        if self.leaving is not None:
            await self.leaving
        self.events.append(("left", scheduler))

    def begin_anew(self) -> None:
        self.info = replace(self.info, executor_epoch=self.info.executor_epoch + 1)
        self.lose()

    # -- streams -----------------------------------------------------------------------------------

    @property
    def are_open(self) -> bool:
        return self.owner is not None

    async def wait_none_open(self) -> None:
        await self.unwatched.wait()

    async def wait_open(self) -> None:
        await self.watched.wait()

    def watch(self, scheduler: str) -> None:
        assert self.owner is None, "an executor belongs to one scheduler at a time"
        self.owner = scheduler
        self.unwatched.clear()
        self.watched.set()

    def lose(self) -> None:
        self.owner = None
        self.unwatched.set()
        self.watched.clear()

    # -- what happens ------------------------------------------------------------------------------

    def kill(self, scheduler: str) -> None:
        self.up.discard(scheduler)
        if self.owner == scheduler:
            self.lose()

    async def sleep(self, delay_s: float) -> None:
        waking = asyncio.get_running_loop().create_future()
        self.sleeping.append((self.now_s + delay_s, waking))
        await waking

    async def run(self, duration_s: float) -> None:
        """Lets so much time pass; the first time, the executor starts."""
        if not self.tasks:
            running = (
                self.registrar.run(),
                self.membership.keep_preferred(),
                self.membership.keep_answered(),
            )
            self.tasks = [asyncio.create_task(work) for work in running]
        until_s = self.now_s + duration_s
        await _settle()
        while self.sleeping and min(at_s for at_s, _ in self.sleeping) <= until_s:
            earliest = min(self.sleeping, key=lambda sleeper: sleeper[0])
            self.sleeping.remove(earliest)
            self.now_s = earliest[0]
            earliest[1].set_result(None)
            await _settle()
        self.now_s = until_s

    @property
    def registered(self) -> list[tuple[object, ...]]:
        return [event[1:] for event in self.events if event[0] == "registered"]


@dataclass
class _Door:
    world: World
    address: str

    async def takes_executors(self) -> bool:
        return self.address in self.world.up - self.world.silent

    async def is_answering(self) -> bool:
        return self.address in self.world.up - self.world.silent

    @asynccontextmanager
    async def questions(self) -> AsyncIterator[Ask]:
        yield self.is_answering

    async def register(self, info: ExecutorInfo) -> int:
        world = self.world
        if self.address not in world.up - world.silent:
            raise RegistrationFailed(UNREACHABLE, {"scheduler": self.address})
        if (reason := world.refusing.get(self.address)) is not None:
            raise RegistrationFailed("registration_refused", {"reason": reason}, reason)
        world.events.append(("registered", self.address, info.executor_epoch))
        if self.address not in world.blind and world.owner is None:
            world.watch(self.address)
        return world.epochs[self.address]


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World(up={FIRST, SECOND, THIRD})
    yield world
    for task in world.tasks:
        assert not task.done(), task
        task.cancel()
    await asyncio.gather(*world.tasks, return_exceptions=True)


async def test_executor_goes_to_the_scheduler_that_it_prefers(world: World) -> None:
    await world.run(1000)
    assert world.registered == [(FIRST, 1)]
    assert world.owner == FIRST


async def test_executor_moves_at_once_when_its_scheduler_dies(
    world: World,
) -> None:
    await world.run(5)
    world.kill(FIRST)
    await world.run(2)
    # A life of its own there: the epochs of the two schedulers are in no order.
    assert world.registered == [(FIRST, 1), (SECOND, 2)]
    assert world.events[-1] == ("adopted", 50)


async def test_executor_stays_when_only_the_stream_was_cut(
    world: World,
) -> None:
    await world.run(5)
    world.lose()
    await world.run(5)
    assert world.registered == [(FIRST, 1), (FIRST, 1)]


async def test_drained_executor_stays_until_it_is_taken_back(
    world: World,
) -> None:
    world.kill(FIRST)
    await world.run(5)
    assert world.owner == SECOND
    world.refusing[SECOND] = "EXECUTOR_DRAINED"
    world.lose()
    world.up.add(FIRST)
    await world.run(1000)
    assert world.is_drained
    assert world.registered == [(SECOND, 1)]

    del world.refusing[SECOND]
    world.kill(FIRST)
    await world.run(5)
    assert world.registered[1:] == [(SECOND, 1)]
    world.lose()
    await world.run(5)
    assert not world.is_drained


async def test_drained_executor_says_so_to_other_schedulers(
    world: World,
) -> None:
    await world.run(5)
    world.refusing = {FIRST: "EXECUTOR_DRAINED", SECOND: "EXECUTOR_DRAINED"}
    world.lose()
    await world.run(5)
    world.kill(FIRST)
    await world.run(100)
    assert world.is_drained
    assert world.owner is None


async def test_executor_waits_in_the_same_life_when_nobody_answers(world: World) -> None:
    await world.run(5)
    world.kill(SECOND)
    world.kill(FIRST)
    await world.run(100)
    world.up.add(FIRST)
    await world.run(5)
    assert world.registered == [(FIRST, 1), (FIRST, 1)]


async def test_executor_moves_back_when_its_preferred_scheduler_is_steady(
    world: World,
) -> None:
    world.kill(FIRST)
    await world.run(5)
    assert world.owner == SECOND
    world.up.add(FIRST)
    # The hold, half as much again for the jitter, and what a look takes.
    await world.run(HOLD_S * 1.5 - 1)
    assert world.owner == SECOND
    await world.run(12)
    assert world.owner == FIRST
    left = world.events.index(("left", SECOND))
    assert world.events[left + 1] == ("registered", FIRST, 2)
    await world.run(1000)
    assert world.registered == [(SECOND, 1), (FIRST, 2)]


async def test_executor_stays_when_its_preferred_scheduler_flaps(
    world: World,
) -> None:
    world.kill(FIRST)
    await world.run(5)
    for _ in range(20):
        world.up.add(FIRST)
        await world.run(25)
        world.kill(FIRST)
        await world.run(10)
    assert world.registered == [(SECOND, 1)]


async def test_executor_moves_when_another_joins_that_it_prefers(world: World) -> None:
    world.schedulers = (SECOND, THIRD)
    await world.run(100)
    assert world.owner == SECOND
    world.schedulers = (FIRST, SECOND, THIRD)
    await world.run(100)
    assert world.registered == [(SECOND, 1), (FIRST, 2)]


async def test_executor_leaves_when_its_scheduler_is_not_named_any_more(world: World) -> None:
    await world.run(5)
    world.schedulers = (SECOND, THIRD)
    await world.run(100)
    assert ("left", FIRST) in world.events
    assert world.owner == SECOND


async def test_executor_stays_when_no_named_scheduler_answers(
    world: World,
) -> None:
    await world.run(5)
    world.schedulers = (SECOND,)
    world.kill(SECOND)
    await world.run(1000)
    assert world.owner == FIRST


async def test_executor_goes_elsewhere_when_it_is_refused(world: World) -> None:
    world.refusing[FIRST] = "MODEL_MISMATCH"
    await world.run(5)
    assert world.owner == SECOND
    # Asked again only when it moves anyway.
    world.kill(SECOND)
    world.up.add(SECOND)
    del world.refusing[FIRST]
    await world.run(5)
    assert world.owner == SECOND
    await world.run(200)
    assert world.owner == FIRST


async def test_executor_waits_for_the_one_it_prefers_when_that_is_busy(world: World) -> None:
    world.refusing[FIRST] = "REGISTRY_BUSY"
    await world.run(3)
    del world.refusing[FIRST]
    await world.run(5)
    assert world.registered == [(FIRST, 1)]


async def test_executor_goes_elsewhere_when_its_scheduler_never_opens_a_stream(
    world: World,
) -> None:
    world.blind.add(FIRST)
    await world.run(20)
    assert world.owner == SECOND
    assert len([event for event in world.registered if event[0] == FIRST]) == 6


async def test_executor_tries_one_scheduler_for_ever_when_there_is_no_other(world: World) -> None:
    world.schedulers = (FIRST,)
    world.kill(FIRST)
    world.refusing[FIRST] = "MODEL_MISMATCH"
    await world.run(100)
    world.up.add(FIRST)
    await world.run(100)
    del world.refusing[FIRST]
    await world.run(10)
    assert world.registered == [(FIRST, 1)]


async def test_executor_goes_on_when_no_scheduler_is_named(
    world: World,
) -> None:
    world.schedulers = ()
    await world.run(100)
    world.schedulers = (SECOND,)
    await world.run(10)
    assert world.owner == SECOND
    world.schedulers = ()
    await world.run(100)
    assert world.owner == SECOND


async def test_executor_goes_to_its_next_choice_when_its_scheduler_answers_nothing(
    world: World,
) -> None:
    await world.run(5)
    world.silent.add(FIRST)
    await world.run(7)
    assert world.registered == [(FIRST, 1), (SECOND, 2)]
    assert world.owner == SECOND
    # Nobody is there to be told.
    assert ("leaves", FIRST) not in world.events


async def test_executor_stays_when_its_scheduler_answers_nothing_and_no_other_does(
    world: World,
) -> None:
    await world.run(5)
    world.silent.update({FIRST, SECOND})
    await world.run(100)
    assert world.owner == FIRST
    assert world.info.executor_epoch == 1
    world.silent.discard(FIRST)
    await world.run(100)
    assert world.registered == [(FIRST, 1)]


async def test_executor_moves_when_another_is_named_after_silence(
    world: World,
) -> None:
    world.schedulers = (FIRST,)
    await world.run(5)
    world.silent.add(FIRST)
    await world.run(2)
    world.schedulers = (SECOND,)
    await world.run(5)
    assert world.owner == SECOND


async def test_executor_leaves_when_its_scheduler_falls_silent_meanwhile(
    world: World,
) -> None:
    world.leaving = asyncio.get_running_loop().create_future()
    world.kill(FIRST)
    await world.run(5)
    world.up.add(FIRST)
    await world.run(HOLD_S * 2)
    assert world.events[-1] == ("leaves", SECOND)
    world.silent.add(SECOND)
    await world.run(7)
    assert world.owner == FIRST


async def test_executor_stays_when_batches_come_from_a_silent_scheduler(
    world: World,
) -> None:
    await world.run(5)
    world.silent.add(FIRST)
    for _ in range(200):
        world.num_batches += 1
        await world.run(0.5)
    assert world.owner == FIRST
