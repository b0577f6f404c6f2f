"""One request from the time it is due to its end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from splitserve_bench.load.outcome import Outcome
from splitserve_bench.load.watcher import Watcher
from splitserve_bench.targets.target import AskFailed, Exchange, Tokens


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
