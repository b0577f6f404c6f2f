"""What became of one request, and when."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from splitserve_bench.targets.target import Answered, AskFailed, Exchange, Tokens


@dataclass(slots=True)
class Outcome:
    """Times are those of the event loop, in seconds. `due_s`: when it was to be sent.

    `arrivals_s`: when tokens came, with `num_tokens` each (None: that is not said). `failed`: the
    kind of error, None for an answer that is complete. `held_s`: how long after `due_s` it waited
    since too many others were open. `is_interrupted`: the run was over before the answer was.
    """

    due_s: float
    num_wanted_tokens: int
    sent_s: float = 0.0
    ended_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    num_tokens: list[int | None] = field(default_factory=list)
    answered: Answered = field(default_factory=Answered)
    failed: str | None = None
    message: str = ""
    held_s: float = 0.0
    is_interrupted: bool = False

    @property
    def num_output_tokens(self) -> int:
        """As the server says; as they were counted; or one for each arrival."""
        if self.answered.num_output_tokens is not None:
            return self.answered.num_output_tokens
        return sum(1 if number is None else number for number in self.num_tokens)

    @property
    def tokens_of_arrivals(self) -> list[float]:
        """How many each arrival brought; where that is not said, as many as the others of those."""
        known = [number for number in self.num_tokens if number is not None]
        num_unsaid = len(self.num_tokens) - len(known)
        each = max(self.num_output_tokens - sum(known), 0) / num_unsaid if num_unsaid else 0.0
        return [each if number is None else number for number in self.num_tokens]


# -- Who is told what a load does ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GivenUp:
    """An open loop sends no more: it is `behind_s` behind the times of its load.

    It is so `after_s` after its begin, with `num_begun` conversations that it did begin.
    """

    behind_s: float
    after_s: float
    num_begun: int


class Watcher(Protocol):
    """Order does not matter: several processes tell it, each when it comes to that."""

    def ended(self, outcome: Outcome) -> None:
        """Nothing more comes of a request."""

    def worked(self, busy_ratio: float) -> None:
        """So much of a second, or of a short round, a generator's thread was computing."""

    def gave_up(self, given_up: GivenUp) -> None:
        """A generator begins nothing more in this round; what runs goes on."""


# -- One request from the time it is due to its end ------------------------------------------------


async def time_exchange(
    exchange: Exchange, outcome: Outcome, timeout_s: float, watcher: Watcher
) -> None:
    """Sends it, and notes in `outcome` what comes. `timeout_s`: from now."""
    clock = asyncio.get_running_loop().time
    outcome.sent_s = clock()
    # Until it is known that it ended otherwise.
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
        outcome.failed, outcome.message = "timeout", f"not answered within {timeout_s:g} s"
    if outcome.failed is None and not outcome.arrivals_s:
        outcome.failed, outcome.message = "empty_answer", "the answer has no tokens"
