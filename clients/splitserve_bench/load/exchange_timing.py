"""One request from the time it is due to its end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Protocol

from splitserve_bench.load.outcome import Outcome
from splitserve_bench.targets.target import AskFailed, Exchange, Tokens


class Watcher(Protocol):
    """Is told of every request while it runs."""

    def sent(self, outcome: Outcome) -> None:
        """It has been sent."""

    def came(self, outcome: Outcome) -> None:
        """Tokens came: the last of its arrivals."""

    def ended(self, outcome: Outcome) -> None:
        """Nothing more comes."""


async def time_exchange(
    exchange: Exchange, outcome: Outcome, timeout_s: float, watcher: Watcher
) -> None:
    """Sends it, and notes in `outcome` what comes. `timeout_s`: from now."""
    clock = asyncio.get_running_loop().time
    outcome.sent_s = clock()
    watcher.sent(outcome)
    try:
        async with asyncio.timeout(timeout_s), aclosing(exchange.send()) as parts:
            async for part in parts:
                if isinstance(part, Tokens):
                    outcome.arrivals_s.append(clock())
                    outcome.num_tokens.append(part.num_tokens)
                    watcher.came(outcome)
                else:
                    outcome.answered = part
    except AskFailed as error:
        outcome.failed, outcome.message = error.kind, error.message
    except TimeoutError:
        outcome.failed, outcome.message = "timeout", f"not answered within {timeout_s:g} s"
    if outcome.failed is None and not outcome.arrivals_s:
        outcome.failed, outcome.message = "empty_answer", "the answer has no tokens"
    outcome.ended_s = clock()
    watcher.ended(outcome)
