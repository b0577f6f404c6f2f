"""Streams side by side, each compared with what it brings undisturbed: `Load`."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitserve_client import Draining, ModelNotReady, ServerUnreachable, SplitserveError
from tests.support.chaos.asks import AnswerBroken, Ask, Ways
from tests.support.processes.http_clients import HttpAnswer

NUM_STREAMS = 64
_RETRY_PAUSE_S = 0.1
_SHORTEST_PAUSE_S = 1.0
# More than can have been on its way.
_NUM_HEARD_ELSEWHERE = 16
# What a client may be told at the door while somebody is away: it has got nothing, and asks again.
PASSING = (ServerUnreachable, ModelNotReady, Draining)


class StreamChanged(AssertionError):
    """An answer is not that of the undisturbed run."""


@dataclass(slots=True)
class Meter:
    """Output tokens of all streams so far."""

    num_tokens: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._changed.set()

    async def wait_until(self, num_tokens: int) -> None:
        """Returns when there are so many."""
        while self.num_tokens < num_tokens:
            await self.wait_change()

    async def wait_change(self) -> None:
        """Returns when something was heard, or an answer is over."""
        self._changed.clear()
        await self._changed.wait()


@dataclass(frozen=True, slots=True)
class StreamPause:
    """A time in which nothing came of an answer that a client waited for."""

    name: str
    since_s: float
    until_s: float


@dataclass(eq=False, slots=True)
class _Reading:
    """An answer that a client reads. `heard_s`: when something came last, or it was asked for."""

    name: str
    heard_s: float
    num_heard: int = 0


@dataclass(slots=True)
class Load:
    """Asks all of `asks` again and again, `NUM_STREAMS` at a time, until it is told to finish.

    Streams take turns at the `ways`. `refused`: how often an ask had to be repeated, by what it was
    told. `pauses`: the longer ones of all streams.
    """

    asks: tuple[Ask, ...]
    truth: Mapping[str, object]
    ways: Sequence[Ways]
    meter: Meter = field(default_factory=Meter)
    refused: Counter[str] = field(default_factory=Counter)
    num_answers: int = 0
    pauses: list[StreamPause] = field(default_factory=list)
    _readings: set[_Reading] = field(default_factory=set)
    _is_finishing: bool = False

    def finish(self) -> None:
        """What has begun comes to its end; nothing new begins."""
        self._is_finishing = True

    async def wait_gone_on(self) -> None:
        """Waits until each answer that is in its middle now has gone on for a while, or is over."""
        before = {reading: reading.num_heard for reading in self._readings if reading.num_heard}
        while any(
            reading in self._readings and reading.num_heard < num_heard + _NUM_HEARD_ELSEWHERE
            for reading, num_heard in before.items()
        ):
            await self.meter.wait_change()

    async def run(self, rng: random.Random) -> None:
        """Returns when it was told to finish, and has. Raises StreamChanged."""
        asks = rng.sample(self.asks, len(self.asks))
        begins = [index * len(asks) // NUM_STREAMS for index in range(NUM_STREAMS)]
        async with asyncio.TaskGroup() as tasks:
            for number, begin in enumerate(begins):
                tasks.create_task(self._run_stream(asks[begin:] + asks[:begin], number))

    async def _run_stream(self, asks: list[Ask], number: int) -> None:
        while True:
            for ask in asks:
                if self._is_finishing:
                    return
                await self._check(ask, number)

    async def _check(self, ask: Ask, number: int) -> None:
        """Asks once, again and elsewhere as long as it is not answered. Raises StreamChanged."""
        expected = self.truth[ask.name]
        for attempt in itertools.count(number):
            try:
                found = await self._read(ask, self.ways[attempt % len(self.ways)])
                break
            except AnswerBroken as broken:
                self._check_broken(ask, broken, expected)
                self.refused[broken.code.partition(":")[0]] += 1
            except PASSING as error:
                self.refused[type(error).__name__] += 1
            except SplitserveError as error:
                raise StreamChanged(f"{ask.name}: {error!r} reason={error.reason}") from error
            await asyncio.sleep(_RETRY_PAUSE_S)
        self.num_answers += 1
        if found != expected:
            raise StreamChanged(f"{ask.name}:\nfound    {found}\nexpected {expected}")

    async def _read(self, ask: Ask, ways: Ways) -> object:
        reading = _Reading(ask.name, time.monotonic())

        def hear(num_tokens: int) -> None:
            now_s = time.monotonic()
            if now_s - reading.heard_s >= _SHORTEST_PAUSE_S:
                self.pauses.append(StreamPause(ask.name, reading.heard_s, now_s))
            reading.heard_s = now_s
            reading.num_heard += num_tokens
            self.meter.hear(num_tokens)

        self._readings.add(reading)
        try:
            return await ask.answer(ways, hear)
        finally:
            self._readings.discard(reading)
            # Whoever waits for it need not wait any more.
            hear(0)

    @staticmethod
    def _check_broken(ask: Ask, broken: AnswerBroken, expected: object) -> None:
        """A gateway that died, or was stopped, or says that it cannot now; nothing else."""
        assert isinstance(expected, HttpAnswer)
        is_passing = broken.code in ("disconnected", "draining") or broken.code.startswith("503 ")
        if not is_passing or not broken.answer.begins(expected):
            raise StreamChanged(f"{ask.name}: {broken.code}, after {broken.answer}")
