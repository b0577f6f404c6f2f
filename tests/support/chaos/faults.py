"""Faults, each with a beginning and an end (`FAULTS`), and a seeded `Schedule` of them."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from splitserve_client import RequestFailed, SamplingParams
from tests.support.chaos.load import PASSING
from tests.support.chaos.network import BOTH, NUM_SCHEDULERS, Direction
from tests.support.chaos.rigged_runner import (
    DEADLY_SEED,
    NOT_A_NUMBER_SEED,
    OUT_OF_RANGE_SEED,
    Sickness,
)
from tests.support.chaos.stack import NUM_GATEWAYS, Stack

# Of the time that a crawling process has: it runs so long, and stands so long.
_CRAWL_RUN_S, _CRAWL_STAND_S = 0.01, 0.15
_SLOW_BYTES_PER_S = 40_000
_LOG_BYTES = 65536
_HARMFUL_PROMPT = [1, 4, 700, 701]
_SUPERVISION_S = 0.2


class Fault(Protocol):
    """`victims`: the processes that it takes; no two faults have one at the same time."""

    @property
    def victims(self) -> tuple[str, ...]: ...

    async def begin(self, stack: Stack) -> None:
        """It happens."""

    async def end(self, stack: Stack) -> None:
        """What it was is over."""


_SCHEDULERS = tuple(f"scheduler-{index}" for index in range(NUM_SCHEDULERS))
_GATEWAYS = tuple(f"gateway-{index}" for index in range(NUM_GATEWAYS))


def _executor(index: int) -> str:
    return f"executor-{index}"


@dataclass(frozen=True, slots=True)
class End:
    """Ends processes by SIGKILL, or with `drains` by SIGTERM; then others begin in their places.

    `spared`: of the same kind. They are there as long as it lasts, which is until all streams have
    gone on there; empty: streams may wait for its end.
    """

    names: tuple[str, ...]
    spared: tuple[str, ...] = ()
    drains: bool = False

    @property
    def victims(self) -> tuple[str, ...]:
        return (*self.names, *self.spared)

    async def begin(self, stack: Stack) -> None:
        if self.spared or self.drains:
            # A process that only begins does not drain, and takes no streams.
            await stack.wait_ready()
        end = stack.stop if self.drains else stack.kill
        await asyncio.gather(*map(end, self.names))

    async def end(self, stack: Stack) -> None:
        for name in self.names:
            await stack.start(name)


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP, and SIGCONT: whoever was given up meanwhile has late results to tell."""

    victims: tuple[str, ...]

    async def begin(self, stack: Stack) -> None:
        for name in self.victims:
            stack.signal(name, signal.SIGSTOP)

    async def end(self, stack: Stack) -> None:
        for name in self.victims:
            stack.signal(name, signal.SIGCONT)


@dataclass(slots=True)
class Crawl:
    """A process that has a sixteenth of its time."""

    victims: tuple[str, ...]
    _task: asyncio.Task[None] | None = None

    async def begin(self, stack: Stack) -> None:
        self._task = asyncio.create_task(self._crawl(stack))

    async def _crawl(self, stack: Stack) -> None:
        (name,) = self.victims
        while True:
            stack.signal(name, signal.SIGSTOP)
            await asyncio.sleep(_CRAWL_STAND_S)
            stack.signal(name, signal.SIGCONT)
            await asyncio.sleep(_CRAWL_RUN_S)

    async def end(self, stack: Stack) -> None:
        assert self._task is not None, "it began"
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        stack.signal(self.victims[0], signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class BadNetwork:
    """Between the schedulers and one executor. `kind`: a method of the network."""

    index: int
    kind: str
    directions: tuple[Direction, ...] = BOTH
    amount: float = 0.0

    @property
    def victims(self) -> tuple[str, ...]:
        return (_executor(self.index),)

    async def begin(self, stack: Stack) -> None:
        network, index = stack.network, self.index
        match self.kind:
            case "hold":
                network.hold(index, self.directions)
            case "delay":
                network.delay(index, self.amount)
            case "lose":
                network.lose(index, self.amount)
            case "throttle":
                network.throttle(index, int(self.amount))
            case "reset":
                network.reset(index, int(self.amount))

    async def end(self, stack: Stack) -> None:
        stack.network.heal(self.index)


@dataclass(frozen=True, slots=True)
class FullDisk:
    """A scheduler can write no more to a file than its journal has now, in all of this life."""

    victims: tuple[str, ...]

    async def begin(self, stack: Stack) -> None:
        (name,) = self.victims
        # Of what it says of that there is to be room.
        room = stack.log(name).stat().st_size + _LOG_BYTES
        num_bytes = max(room, stack.journal(name).stat().st_size)
        _, most = resource.prlimit(stack.pid(name), resource.RLIMIT_FSIZE)
        resource.prlimit(stack.pid(name), resource.RLIMIT_FSIZE, (num_bytes, most))

    async def end(self, stack: Stack) -> None:
        pass


@dataclass(slots=True)
class Harm:
    """A request that harms the executor it runs on, and has to fail for one of `reasons`."""

    seed: int
    reasons: frozenset[str]
    victims: tuple[str, ...] = ()
    _asking: asyncio.Task[str] | None = None

    async def begin(self, stack: Stack) -> None:
        self._asking = asyncio.create_task(self._ask(stack))

    async def _ask(self, stack: Stack) -> str:
        params = SamplingParams(seed=self.seed, max_tokens=100, ignore_eos=True)
        while True:
            try:
                await stack.clients[0].complete(_HARMFUL_PROMPT, params)
            except RequestFailed as failed:
                return failed.reason
            except PASSING:
                await asyncio.sleep(_SUPERVISION_S)
            else:
                return ""

    async def end(self, stack: Stack) -> None:
        assert self._asking is not None, "it began"
        while not self._asking.done():
            # As whoever runs containers does.
            for name in self.victims:
                await stack.start(name)
            await asyncio.wait([self._asking], timeout=_SUPERVISION_S)
        assert self._asking.result() in self.reasons, f"{self.reasons}: {self._asking.result()}"


@dataclass(frozen=True, slots=True)
class Sick:
    """An executor computes nothing right from now on, until it is over.

    Nobody else is harmed meanwhile, and its scheduler has another executor that is well: where
    there is none, requests end by name.
    """

    index: int
    sickness: Sickness
    victims: tuple[str, ...] = (*_SCHEDULERS, *map(_executor, range(3)))

    async def begin(self, stack: Stack) -> None:
        await stack.start_missing()
        await stack.wait_for(stack.are_all_well)
        path = stack.sickness(_executor(self.index))
        told = path.with_suffix(".new")
        told.write_text(self.sickness.value)
        told.replace(path)

    async def end(self, stack: Stack) -> None:
        stack.sickness(_executor(self.index)).unlink()
        await stack.wait_for(stack.are_all_well)


Draw = Callable[[random.Random], Fault]


def _one(rng: random.Random) -> tuple[str, ...]:
    return (_executor(rng.randrange(3)),)


def _of(names: Sequence[str]) -> Callable[[random.Random], tuple[str, ...]]:
    return lambda rng: (rng.choice(names),)


_one_scheduler, _one_gateway = _of(_SCHEDULERS), _of(_GATEWAYS)


def _end_scheduler(rng: random.Random, *, drains: bool) -> End:
    name = rng.choice(_SCHEDULERS)
    return End((name,), tuple(each for each in _SCHEDULERS if each != name), drains)


def _sick(sickness: Sickness) -> Draw:
    # Its scheduler has the last one, too. Always the same: a request that fails on one, and later
    # on the other, cannot be tried on a third.
    return lambda _: Sick(0, sickness)


def _bad_network(kind: str, least: float = 0.0, most: float = 0.0) -> Draw:
    return lambda rng: BadNetwork(rng.randrange(3), kind, amount=rng.uniform(least, most))


def _one_way(direction: Direction) -> Draw:
    return lambda rng: BadNetwork(rng.randrange(3), "hold", (direction,))


# How each is drawn. Of two that are killed the third has to do everything.
FAULTS: Mapping[str, Draw] = {
    "executor killed": lambda rng: End(_one(rng)),
    "two executors killed": lambda rng: End(tuple(map(_executor, sorted(rng.sample(range(3), 2))))),
    "all executors killed": lambda _: End(tuple(map(_executor, range(3)))),
    "executor stopped": lambda rng: End(_one(rng), drains=True),
    "executor paused": lambda rng: Pause(_one(rng)),
    "executor crawls": lambda rng: Crawl(_one(rng)),
    "network cut": _bad_network("hold"),
    "network cut: no steps arrive": _one_way(Direction.IN),
    "network cut: no results arrive": _one_way(Direction.OUT),
    "network delays": _bad_network("delay", 0.02, 0.1),
    "network loses": _bad_network("lose", 0.02, 0.2),
    "network slow": _bad_network("throttle", _SLOW_BYTES_PER_S, 10 * _SLOW_BYTES_PER_S),
    "stream reset in mid-message": _bad_network("reset", 1, 3000),
    **{f"executor sick: {sickness.value}": _sick(sickness) for sickness in Sickness},
    "scheduler killed": lambda rng: _end_scheduler(rng, drains=False),
    "all schedulers killed": lambda _: End(_SCHEDULERS),
    "scheduler stopped": lambda rng: _end_scheduler(rng, drains=True),
    "scheduler paused": lambda rng: Pause(_one_scheduler(rng)),
    "gateway killed": lambda rng: End(_one_gateway(rng)),
    "gateway stopped": lambda rng: End(_one_gateway(rng), drains=True),
    "gateway paused": lambda rng: Pause(_one_gateway(rng)),
    "disk full": lambda rng: FullDisk(_one_scheduler(rng)),
    "garbage: no numbers": lambda _: Harm(NOT_A_NUMBER_SEED, frozenset({"INVALID_LOGITS"})),
    "garbage: no token": lambda _: Harm(OUT_OF_RANGE_SEED, frozenset({"ROW_FAILED"})),
    "deadly request": lambda _: Harm(
        DEADLY_SEED, frozenset({"EXECUTOR_LOST_REPEATEDLY"}), tuple(map(_executor, range(3)))
    ),
}


# -- which of them happen when ---------------------------------------------------------------------

# Output tokens of all streams, between the beginnings of two faults and during one.
_LEAST_TOKENS, _MOST_TOKENS = 100, 2000


@dataclass(frozen=True, slots=True)
class Moment:
    """`begins_at`: output tokens of all streams by then; `num_tokens`: and from then to its end."""

    begins_at: int
    num_tokens: int
    kind: str
    fault: Fault

    def __str__(self) -> str:
        return (
            f"after {self.begins_at} tokens, for {self.num_tokens}: {self.kind}"
            f" ({', '.join(self.fault.victims)}) {self.fault}"
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """The moments in order of their beginnings; faults may overlap."""

    seed: int
    moments: tuple[Moment, ...]

    @classmethod
    def drawn(cls, seed: int, num_faults: int, kinds: Sequence[str] = tuple(FAULTS)) -> Schedule:
        """The same for the same seed, number and kinds."""
        rng = random.Random(seed)
        moments: list[Moment] = []
        for _ in range(num_faults):
            gap = _draw_tokens(rng)
            moments.append(_drawn_after(moments, gap, rng.choice(list(kinds)), rng))
        return cls(seed, tuple(moments))

    @classmethod
    def of_each(cls, seed: int, kinds: Sequence[str]) -> Schedule:
        """Each kind once, in this order."""
        rng = random.Random(seed)
        moments: list[Moment] = []
        for kind in kinds:
            moments.append(_drawn_after(moments, _draw_tokens(rng), kind, rng))
        return cls(seed, tuple(moments))

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}:", *(f"  {moment}" for moment in self.moments)])


def _draw_tokens(rng: random.Random) -> int:
    return rng.randint(_LEAST_TOKENS, _MOST_TOKENS)


def _drawn_after(moments: Sequence[Moment], gap: int, kind: str, rng: random.Random) -> Moment:
    """`gap`: output tokens since the beginning of the last of `moments`."""
    begins_at = gap + (moments[-1].begins_at if moments else 0)
    num_tokens = _draw_tokens(rng)
    return Moment(begins_at, num_tokens, kind, FAULTS[kind](rng))
