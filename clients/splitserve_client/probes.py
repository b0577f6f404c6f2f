"""Search for a serving scheduler: probes start shortly after each other, the first success wins."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from splitserve_client.errors import SplitserveError

# Number of unanswered probes that run at the same time.
MAX_AT_ONCE = 8
# Delay before the next probe if no answer arrives. Usually the first scheduler answers. If clients
# probed all schedulers at once, all clients would choose the fastest and not be spread.
_PACE_S = 0.25

IsServing = Callable[[str], Awaitable[bool]]


@dataclass(slots=True)
class Answers:
    """Answers of the probed schedulers.

    `serving`: one that serves; `idle`: the first that does not.
    """

    serving: str | None = None
    idle: str | None = None
    problem: SplitserveError | None = None


async def ask(addresses: Iterable[str], is_serving: IsServing, answers: Answers) -> None:
    """Probes schedulers and adds to `answers` until one serves or all have answered.

    `is_serving` raises SplitserveError for an unreachable scheduler, and takes bounded time.
    """
    left = deque(addresses)
    asked: dict[asyncio.Future[bool], str] = {}
    try:
        while answers.serving is None and (left or asked):
            if left and len(asked) < MAX_AT_ONCE:
                address = left.popleft()
                asked[asyncio.ensure_future(is_serving(address))] = address
            may_ask = bool(left) and len(asked) < MAX_AT_ONCE
            await asyncio.wait(
                asked,
                timeout=_PACE_S if may_ask else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for probe in [probe for probe in asked if probe.done()]:
                _note(asked.pop(probe), probe, answers)
    finally:
        for probe in asked:
            probe.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def _note(address: str, probe: asyncio.Future[bool], answers: Answers) -> None:
    try:
        if not probe.result():
            answers.idle = answers.idle or address
        elif answers.serving is None:
            answers.serving = address
    except SplitserveError as error:
        answers.problem = error
