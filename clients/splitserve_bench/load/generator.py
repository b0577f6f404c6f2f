"""Two ways to put load on a target: by the clock, or by what was answered.

Open loop: conversations begin when they are due, however long others take. All latencies count
from when a request was due, so a target (or this generator) that falls behind cannot hide it
(coordinated omission). Closed loop: so many conversations at a time, a request is due when it is
sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from splitserve_bench.load.exchange_timing import time_exchange
from splitserve_bench.load.outcome import Outcome
from splitserve_bench.load.watcher import GivenUp, Watcher
from splitserve_bench.targets.target import Dialog
from splitserve_bench.workloads.conversation import Conversation

# Before the first is due, so that it is not late.
_LEAD_S = 0.05


@dataclass(frozen=True, slots=True)
class Pace:
    """`concurrency`: of a closed loop; None: an open one, of `max_open` conversations at most.

    That begins none more once it is `max_behind_s` behind the times of its load.
    """

    concurrency: int | None = None
    max_open: int = 4096
    timeout_s: float = 600.0
    duration_s: float | None = None
    max_behind_s: float = 30.0


class Generator:
    """Runs conversations with one target."""

    def __init__(self, begin: Callable[[], Dialog], pace: Pace, watcher: Watcher) -> None:
        self._begin = begin
        self._pace = pace
        self._watcher = watcher

    async def run(self, conversations: Iterator[Conversation], begin_s: float) -> None:
        """Returns when the last of them has ended; cancelling ends those that run.

        `begin_s`: of an open loop, which all that put this load on a target have in common.
        """
        if self._pace.concurrency is None:
            await self._run_open(conversations, begin_s + _LEAD_S)
        else:
            await self._run_closed(conversations, self._pace.concurrency)

    async def _run_open(self, conversations: Iterator[Conversation], begin_s: float) -> None:
        clock = asyncio.get_running_loop().time
        places = asyncio.Semaphore(self._pace.max_open)
        free_s, num_begun = begin_s, 0

        async def converse(
            conversation: Conversation, dialog: Dialog, due_s: float, held_s: float
        ) -> None:
            try:
                await self._converse(conversation, dialog, due_s, held_s)
            finally:
                places.release()

        async with asyncio.TaskGroup() as tasks:
            for conversation in conversations:
                due_s = begin_s + conversation.arrival_s
                await _until(due_s - _LEAD_S)
                # Beyond the bound it waits here, and that counts as its latency.
                was_full = places.locked()
                latest_s = due_s + self._pace.max_behind_s
                if clock() > latest_s or not await _acquire(places, latest_s):
                    behind_s, after_s = clock() - due_s, clock() - begin_s
                    self._watcher.gave_up(GivenUp(behind_s, after_s, num_begun))
                    break
                num_begun += 1
                if was_full:
                    free_s = clock()
                # Those that come next are held by the same wait.
                held_s = max(free_s - due_s, 0.0)
                tasks.create_task(converse(conversation, self._begin(), due_s, held_s))

    async def _run_closed(self, conversations: Iterator[Conversation], concurrency: int) -> None:
        clock = asyncio.get_running_loop().time
        duration_s = self._pace.duration_s
        end_s = None if duration_s is None else clock() + duration_s

        async def one_after_another() -> None:
            while end_s is None or clock() < end_s:
                conversation = next(conversations, None)
                if conversation is None:
                    return
                await self._converse(conversation, self._begin(), None)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(one_after_another())

    async def _converse(
        self,
        conversation: Conversation,
        dialog: Dialog,
        due_s: float | None,
        held_s: float = 0.0,
    ) -> None:
        """`due_s`: of the first turn, None for as soon as it is ready; `held_s`: of that, too."""
        clock = asyncio.get_running_loop().time
        ended_s = None
        for turn in conversation.turns:
            exchange = dialog.prepare(turn)
            if ended_s is not None and (turn.think_s or due_s is not None):
                due_s = ended_s + turn.think_s
            if due_s is not None:
                await _until(due_s)
            outcome = Outcome(clock() if due_s is None else due_s, turn.num_output_tokens)
            outcome.held_s, held_s = held_s, 0.0
            await time_exchange(exchange, outcome, self._pace.timeout_s, self._watcher)
            if outcome.failed is not None:
                return
            ended_s = outcome.ended_s


async def _acquire(places: asyncio.Semaphore, latest_s: float) -> bool:
    """Whether there is a place by then."""
    if not places.locked():
        return await places.acquire()
    try:
        async with asyncio.timeout_at(latest_s):
            return await places.acquire()
    except TimeoutError:
        return False


async def _until(at_s: float) -> None:
    delay_s = at_s - asyncio.get_running_loop().time()
    if delay_s > 0:
        await asyncio.sleep(delay_s)
