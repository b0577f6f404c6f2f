"""Load generators: open loop and closed loop, and a load on targets by this process.

Open loop: conversations begin when they are due, however long others take. All latencies count
from when a request was due, so a late target (or generator) cannot hide its delay (coordinated
omission). Closed loop: a fixed number of conversations at a time; a request is due when it is
sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from splitserve_bench.load.outcome import LoadAbandoned, Outcome, Watcher, time_exchange
from splitserve_bench.targets import AskFailed, Dialog, Target
from splitserve_bench.workloads import Conversation, PromptPiece, Turn

# Head start, so that the first request is not late.
_LEAD_S = 0.05


@dataclass(frozen=True, slots=True)
class Pace:
    """Pace of a load.

    `concurrency`: conversations at a time in a closed loop; None for an open loop of at most
    `max_open` conversations. An open loop that is `max_behind_s` late begins no more.
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
        """Runs all conversations; cancelling interrupts them.

        `begin_s`: begin of an open loop, common to all generators of the load.
        """
        if self._pace.concurrency is None:
            await self._run_open(conversations, begin_s + _LEAD_S)
        else:
            await self._run_closed(conversations, self._pace.concurrency)

    async def _run_open(self, conversations: Iterator[Conversation], begin_s: float) -> None:
        clock = asyncio.get_running_loop().time
        slots = asyncio.Semaphore(self._pace.max_open)
        free_s, num_begun = begin_s, 0

        async def converse(
            conversation: Conversation, dialog: Dialog, due_s: float, held_s: float
        ) -> None:
            try:
                await self._converse(conversation, dialog, due_s, held_s)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as tasks:
            for conversation in conversations:
                due_s = begin_s + conversation.arrival_s
                await _until(due_s - _LEAD_S)
                # Conversations beyond `max_open` wait here; the wait counts as latency.
                was_full = slots.locked()
                latest_s = due_s + self._pace.max_behind_s
                if clock() > latest_s or not await _acquire(slots, latest_s):
                    behind_s, after_s = clock() - due_s, clock() - begin_s
                    self._watcher.gave_up(LoadAbandoned(behind_s, after_s, num_begun))
                    break
                num_begun += 1
                if was_full:
                    free_s = clock()
                # The next conversations are late because of the same wait.
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
        """Runs the turns of one conversation; ends at the first failed turn.

        `due_s`: when the first turn is due, None for at once; `held_s`: wait of the first turn, see
        `Outcome`.
        """
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


async def _acquire(slots: asyncio.Semaphore, latest_s: float) -> bool:
    """Acquires a slot. Returns False if none is free by `latest_s`."""
    if not slots.locked():
        return await slots.acquire()
    try:
        async with asyncio.timeout_at(latest_s):
            return await slots.acquire()
    except TimeoutError:
        return False


async def _until(at_s: float) -> None:
    delay_s = at_s - asyncio.get_running_loop().time()
    if delay_s > 0:
        await asyncio.sleep(delay_s)


# -- Load on targets by this process ---------------------------------------------------------------

_MOST_MESSAGE = 300
_PROBE = Turn((PromptPiece(2**63 - 1, 8),), 2)
# Used by no round: salts of rounds count up from 0.
_PROBE_SALT = -1
_SAMPLE_S = 1.0


class TargetUnusable(Exception):
    """A target did not answer before the load began; the message names target and reason."""


class LocalLoad:
    """Connects to all targets, and puts the load on one target at a time."""

    def __init__(
        self,
        targets: Sequence[tuple[str, Target]],
        workload: Callable[[], Iterator[Conversation]],
        pace: Pace,
    ) -> None:
        self._targets = targets
        self._workload = workload
        self._pace = pace
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def get_ready(self) -> list[str]:
        """Connects to the targets; returns the model of each. Raises TargetUnusable."""
        models = []
        for name, target in self._targets:
            await self._stack.enter_async_context(target)
            models.append(await self._ask_once(name, target))
        return models

    async def _ask_once(self, name: str, target: Target) -> str:
        """Sends a probe request, to find errors before the load and to open connections.

        Returns the target's model. Raises TargetUnusable.
        """
        try:
            async with asyncio.timeout(self._pace.timeout_s):
                model = await target.get_ready()
                exchange = target.begin(_PROBE_SALT).prepare(_PROBE)
                async with aclosing(exchange.send()) as parts:
                    async for _ in parts:
                        pass
        except AskFailed as error:
            message = error.message[:_MOST_MESSAGE]
            raise TargetUnusable(f"{name}: {message} [{error.kind}]") from error
        except TimeoutError as error:
            raise TargetUnusable(f"{name}: no answer within {self._pace.timeout_s:g} s") from error
        return model

    async def run(self, index: int, salt: int, begin_s: float, watcher: Watcher) -> None:
        """Runs one round with target number `index`.

        Cancelling interrupts running requests, and their outcomes still reach the watcher.
        """
        begin = partial(self._targets[index][1].begin, salt)
        generator = Generator(begin, self._pace, watcher)
        sampling = asyncio.create_task(_sample(watcher))
        try:
            await generator.run(self._workload(), begin_s)
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})


async def _sample(watcher: Watcher) -> None:
    """Reports how busy this thread is, each second until cancelled.

    One thread is the limit: Python computes on one thread at a time.
    """
    clock = asyncio.get_running_loop().time
    since_s, used_s = clock(), time.thread_time()
    while True:
        try:
            await asyncio.sleep(_SAMPLE_S)
        finally:
            now_s, now_used_s = clock(), time.thread_time()
            if now_s > since_s:
                watcher.worked((now_used_s - used_s) / (now_s - since_s))
            since_s, used_s = now_s, now_used_s
