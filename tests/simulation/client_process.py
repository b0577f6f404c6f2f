"""A simulated client: the real library, with some requests, whose answers are compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random

from splitserve_client import (
    AsyncClient,
    ClientConfig,
    Finish,
    FinishReason,
    RetryPolicy,
    Session,
    SplitserveError,
    Timing,
    Tokens,
    collect_generation,
)
from tests.simulation.virtual_loop import Process, VirtualLoop
from tests.simulation.workload import Wanted
from tests.support.fakes.fake_model import fake_logprob

# Longer than any history: who gives up has met a bug.
_PATIENCE_S = 3600.0


class Wrong(Exception):
    """A client got what it must not get."""


@dataclass(slots=True)
class Outcome:
    """What became of a request so far."""

    wanted: Wanted
    events: list[Tokens | Finish] = field(default_factory=list)
    error: SplitserveError | None = None
    wrong: Wrong | None = None
    is_aborted: bool = False
    is_over: bool = False
    asked_at_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Of all its sequences."""
        return len(self.token_times_s)

    @property
    def first_token_at_s(self) -> float:
        """When that came; it has some."""
        return self.token_times_s[0]

    def describe(self) -> str:
        """For people."""
        state = "over" if self.is_over else "NOT OVER"
        how = f", {self.error!r} {self.error.reason}" if self.error is not None else ""
        return f"{self.wanted.request_id}: {self.num_tokens} tokens, {state}{how}"


class SimulatedClient:
    """One process with one connection; its requests go over it by themselves or in a session."""

    def __init__(
        self,
        loop: VirtualLoop,
        random: Random,
        host: str,
        schedulers: str,
        wanted: Sequence[Wanted],
    ) -> None:
        self.outcomes = [Outcome(each) for each in wanted]
        self.process = Process(loop, host)
        self._loop = loop
        self._schedulers = schedulers
        self._config = ClientConfig(
            retry=RetryPolicy(give_up_after_s=_PATIENCE_S),
            timing=Timing(loop.time, asyncio.sleep, random.random),
        )

    def start(self) -> asyncio.Task[None]:
        """The task ends with the last request."""
        return self.process.start(self._live())

    async def _live(self) -> None:
        async with (
            AsyncClient(self._schedulers, self._config) as client,
            client.session() as session,
        ):
            asking = [self._ask(outcome, client, session) for outcome in self.outcomes]
            await asyncio.gather(*asking)

    async def _ask(self, outcome: Outcome, client: AsyncClient, session: Session) -> None:
        await asyncio.sleep(outcome.wanted.at_s)
        outcome.asked_at_s = self._loop.time()
        try:
            if outcome.wanted.in_session:
                await self._ask_in_session(outcome, session)
            else:
                await self._ask_alone(outcome, client)
            if not outcome.is_aborted:
                await check_all(outcome)
        except SplitserveError as error:
            outcome.error = error
        except Wrong as wrong:
            outcome.wrong = wrong
        outcome.is_over = True

    async def _ask_in_session(self, outcome: Outcome, session: Session) -> None:
        wanted = outcome.wanted
        events = session.submit(
            wanted.prompt,
            wanted.params,
            request_id=wanted.request_id,
            scheduling=wanted.scheduling,
        )
        if wanted.abort_after == 0:
            outcome.is_aborted = True
            events.abort()
        async for event in events:
            note(outcome, event, self._loop.time())
            if is_enough(outcome):
                events.abort()
            await asyncio.sleep(wanted.read_pause_s)

    async def _ask_alone(self, outcome: Outcome, client: AsyncClient) -> None:
        wanted = outcome.wanted
        events = client.generate(
            wanted.prompt,
            wanted.params,
            request_id=wanted.request_id,
            scheduling=wanted.scheduling,
        )
        async with aclosing(events):
            async for event in events:
                note(outcome, event, self._loop.time())
                if is_enough(outcome):
                    return
                await asyncio.sleep(wanted.read_pause_s)


def is_enough(outcome: Outcome) -> bool:
    """Whether the client wants no more, which is noted."""
    after = outcome.wanted.abort_after
    if after is not None and len(outcome.events) >= max(after, 1):
        outcome.is_aborted = True
    return outcome.is_aborted


def note(outcome: Outcome, event: Tokens | Finish, now_s: float) -> None:
    """Adds an event that has come. Raises Wrong if it must not."""
    outcome.events.append(event)
    if isinstance(event, Tokens):
        outcome.token_times_s += [now_s] * len(event.token_ids)
        _check_tokens(outcome, event.index)


def _check_tokens(outcome: Outcome, index: int) -> None:
    """What came of one sequence so far begins as the truth does."""
    parts = [e for e in outcome.events if isinstance(e, Tokens) and e.index == index]
    got = [token for part in parts for token in part.token_ids]
    expected = list(outcome.wanted.completions[index].token_ids)
    if got != expected[: len(got)]:
        raise Wrong(f"sequence {index} has {got}; expected: {expected}")
    if outcome.wanted.params.num_logprobs is not None:
        scores = [(score.token_id, score.logprob) for part in parts for score in part.logprobs]
        if scores != [(token, fake_logprob(token)) for token in got]:
            raise Wrong(f"sequence {index} has the scores {scores}; its tokens: {got}")


async def check_all(outcome: Outcome) -> None:
    """Raises Wrong unless everything is there, and nothing else.

    An end by abort is for who has asked for it.
    """
    wanted = outcome.wanted
    last = outcome.events[-1] if outcome.events else None
    if not isinstance(last, Finish) or last.reason is FinishReason.ABORTED:
        raise Wrong(f"it ended with {last}")
    generation = await collect_generation(_again(outcome.events), wanted.params.num_completions)
    for got, expected in zip(generation.completions, wanted.completions, strict=True):
        for name in ("token_ids", "reason", "stop_token_id", "cumulative_logprob", "score"):
            is_scored = name in ("cumulative_logprob", "score")
            if is_scored and getattr(expected, name) is None:
                continue
            if getattr(got, name) != getattr(expected, name):
                raise Wrong(f"{name} is {getattr(got, name)}; expected: {getattr(expected, name)}")
    scores = [score.logprob for score in generation.prompt_logprobs]
    if scores != wanted.prompt_logprobs:
        raise Wrong(f"prompt_logprobs are {scores}; expected: {wanted.prompt_logprobs}")


async def _again(events: Sequence[Tokens | Finish]) -> AsyncIterator[Tokens | Finish]:
    for event in events:
        yield event
