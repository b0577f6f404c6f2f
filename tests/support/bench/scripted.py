"""Targets for the load generator that answer after known delays, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from splitserve_bench.targets.target import AnswerSummary, AskFailed, Part, Tokens
from splitserve_bench.workloads.conversation import Conversation, PromptPiece, Turn
from tests.simulation.virtual_loop import new_loop

# Seconds before each arrival, and how many tokens it brings (None: that is not said).
Delays = Sequence[tuple[float, int | None]]


@dataclass(frozen=True, slots=True)
class Script:
    """What a request meets. `failure`: after the arrivals, in place of an end."""

    arrivals: Delays
    end_s: float = 0.0
    failure: AskFailed | None = None
    answered: AnswerSummary | None = None


@dataclass(slots=True)
class ScriptedTarget:
    """Answers request n by `script(n)`, `num_served` at a time: others wait in its queue."""

    script: Callable[[int], Script]
    num_served: int = 10**6
    sent_s: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    salts: list[int] = field(default_factory=list)
    places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.places = asyncio.Semaphore(self.num_served)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    async def get_ready(self) -> str:
        return "scripted"

    def begin(self, salt: int) -> Self:
        self.salts.append(salt)
        return self

    def prepare(self, turn: Turn) -> _Exchange:
        self.turns.append(turn)
        return _Exchange(self, turn)


@dataclass(frozen=True, slots=True)
class _Exchange:
    target: ScriptedTarget
    turn: Turn

    async def send(self) -> AsyncGenerator[Part, None]:
        sent_s = self.target.sent_s
        script = self.target.script(len(sent_s))
        sent_s.append(asyncio.get_running_loop().time())
        async with self.target.places:
            for delay_s, num_tokens in script.arrivals:
                await asyncio.sleep(delay_s)
                yield Tokens(num_tokens)
            await asyncio.sleep(script.end_s)
        if script.failure is not None:
            raise script.failure
        num_tokens = sum(number or 1 for _, number in script.arrivals)
        yield script.answered or AnswerSummary(self.turn.num_new_tokens, num_tokens, 0)


def at(*times_s: float) -> list[Conversation]:
    """Single requests of 10 tokens that are due then."""
    return [
        Conversation(time_s, (Turn((PromptPiece(number, 10),), 4),))
        for number, time_s in enumerate(times_s)
    ]


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
    """What `main` returns, with time that passes at once; nothing may have failed beside it."""
    loop = new_loop()
    try:
        result = loop.run_until_complete(main)
    finally:
        loop.close()
    assert loop.errors == []
    return result
