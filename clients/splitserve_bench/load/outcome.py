"""Outcome of one request with its times; watchers that receive outcomes; timing of a request."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from splitserve_bench.targets import AnswerSummary, AskFailed, Exchange, Tokens


@dataclass(slots=True)
class Outcome:
    """Outcome of one request. Times are those of the event loop, in seconds.

    `due_s`: when the request was to be sent. `arrivals_s`: when tokens arrived, with `num_tokens`
    each (None: unknown). `failed`: kind of error, None for a complete answer. `held_s`: how long
    after `due_s` the request waited because too many others were open. `is_interrupted`: the run
    ended before the answer did.
    """

    due_s: float
    num_wanted_tokens: int
    sent_s: float = 0.0
    ended_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    num_tokens: list[int | None] = field(default_factory=list)
    answered: AnswerSummary = field(default_factory=AnswerSummary)
    failed: str | None = None
    message: str = ""
    held_s: float = 0.0
    is_interrupted: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens: as the server reports, as counted, or one per arrival."""
        if self.answered.num_output_tokens is not None:
            return self.answered.num_output_tokens
        return sum(1 if number is None else number for number in self.num_tokens)

    @property
    def tokens_of_arrivals(self) -> list[float]:
        """Number of tokens of each arrival.

        Arrivals of unknown size share the remaining tokens equally.
        """
        known = [number for number in self.num_tokens if number is not None]
        num_unsaid = len(self.num_tokens) - len(known)
        each = max(self.num_output_tokens - sum(known), 0) / num_unsaid if num_unsaid else 0.0
        return [each if number is None else number for number in self.num_tokens]


# -- Watchers of a load ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadAbandoned:
    """An open loop has stopped sending because it is `behind_s` late.

    This happened `after_s` after its begin, with `num_begun` conversations begun.
    """

    behind_s: float
    after_s: float
    num_begun: int


class Watcher(Protocol):
    """Receiver of a load's events, in any order: several processes may report."""

    def ended(self, outcome: Outcome) -> None:
        """Receives the outcome of an ended request."""

    def worked(self, busy_ratio: float) -> None:
        """Receives the busy ratio of a generator's thread over a second, or over a short round."""

    def gave_up(self, given_up: LoadAbandoned) -> None:
        """Notes that a generator starts no more conversations in this round; running ones go on."""


# -- Timing of one request -------------------------------------------------------------------------


async def time_exchange(
    exchange: Exchange, outcome: Outcome, timeout_s: float, watcher: Watcher
) -> None:
    """Sends the request, and records its progress in `outcome`. `timeout_s`: counts from now.

    Reports the outcome to `watcher` in every case.
    """
    clock = asyncio.get_running_loop().time
    outcome.sent_s = clock()
    # Stays True if the task is cancelled.
    outcome.is_interrupted = True
    try:
        await _receive(exchange, outcome, timeout_s)
        outcome.is_interrupted = False
    finally:
        outcome.ended_s = clock()
        watcher.ended(outcome)


async def _receive(exchange: Exchange, outcome: Outcome, timeout_s: float) -> None:
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(timeout_s), aclosing(exchange.send()) as parts:
            async for part in parts:
                if isinstance(part, Tokens):
                    outcome.arrivals_s.append(clock())
                    outcome.num_tokens.append(part.num_tokens)
                else:
                    outcome.answered = part
    except AskFailed as error:
        outcome.failed, outcome.message = error.kind, error.message
    except TimeoutError:
        outcome.failed, outcome.message = "timeout", f"no complete answer within {timeout_s:g} s"
    if outcome.failed is None and not outcome.arrivals_s:
        outcome.failed, outcome.message = "empty_answer", "the answer has no tokens"
