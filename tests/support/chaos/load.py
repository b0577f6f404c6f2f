"""Streams side by side, each compared with what it brings undisturbed: `Load`."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from splitserve_client import Draining, ModelNotReady, ServerUnreachable, SplitserveError
from tests.support.chaos.asks import AnswerBroken, Ask, Ways
from tests.support.processes.http_answers import HttpAnswer

NUM_STREAMS = 64
_RETRY_PAUSE_S = 0.1
# What a client may be told at the door while somebody is away: it has got nothing, and asks again.
_PASSING = (ServerUnreachable, ModelNotReady, Draining)


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
            self._changed.clear()
            await self._changed.wait()


@dataclass(slots=True)
class Load:
    """Asks all of `asks` again and again, `NUM_STREAMS` at a time, until it is told to finish.

    `refused`: how often an ask had to be repeated, by what it was told.
    """

    asks: tuple[Ask, ...]
    truth: Mapping[str, object]
    ways: Ways
    meter: Meter = field(default_factory=Meter)
    refused: Counter[str] = field(default_factory=Counter)
    num_answers: int = 0
    _is_finishing: bool = False

    def finish(self) -> None:
        """What has begun comes to its end; nothing new begins."""
        self._is_finishing = True

    async def run(self, rng: random.Random) -> None:
        """Returns when it was told to finish, and has. Raises StreamChanged."""
        asks = rng.sample(self.asks, len(self.asks))
        begins = [index * len(asks) // NUM_STREAMS for index in range(NUM_STREAMS)]
        async with asyncio.TaskGroup() as tasks:
            for begin in begins:
                tasks.create_task(self._run_stream(asks[begin:] + asks[:begin]))

    async def _run_stream(self, asks: list[Ask]) -> None:
        while True:
            for ask in asks:
                if self._is_finishing:
                    return
                await self.check(ask)

    async def check(self, ask: Ask) -> None:
        """Asks once, again as long as nobody can take it. Raises StreamChanged."""
        expected = self.truth[ask.name]
        while True:
            try:
                found = await ask.answer(self.ways, self.meter.hear)
                break
            except AnswerBroken as broken:
                self._check_broken(ask, broken, expected)
                self.refused[broken.code.partition(":")[0]] += 1
            except _PASSING as error:
                self.refused[type(error).__name__] += 1
            except SplitserveError as error:
                raise StreamChanged(f"{ask.name}: {error!r} reason={error.reason}") from error
            await asyncio.sleep(_RETRY_PAUSE_S)
        self.num_answers += 1
        if found != expected:
            raise StreamChanged(f"{ask.name}:\nfound    {found}\nexpected {expected}")

    @staticmethod
    def _check_broken(ask: Ask, broken: AnswerBroken, expected: object) -> None:
        """A gateway that died, or one that says that it cannot now; nothing else may be told."""
        assert isinstance(expected, HttpAnswer)
        is_passing = broken.code == "disconnected" or broken.code.startswith("503 ")
        if not is_passing or not broken.answer.begins(expected):
            raise StreamChanged(f"{ask.name}: {broken.code}, after {broken.answer}")
