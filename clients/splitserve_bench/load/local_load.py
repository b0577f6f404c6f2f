"""A load on targets, by this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from types import TracebackType
from typing import Self

from splitserve_bench.load.generator import Generator, Pace
from splitserve_bench.load.watcher import Watcher
from splitserve_bench.targets.target import AskFailed, Target
from splitserve_bench.workloads.conversation import Conversation, Piece, Turn

_MOST_MESSAGE = 300
_PROBE = Turn((Piece(2**63 - 1, 8),), 2)
# Nobody else's: those of rounds count up from 0.
_PROBE_SALT = -1
_SAMPLE_S = 1.0


class TargetUnusable(Exception):
    """A target did not answer before the load began; the message says which, and why."""


class LocalLoad:
    """Connects to all targets, and puts the load on one of them at a time."""

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
        """Each target's model. Raises TargetUnusable."""
        models = []
        for name, target in self._targets:
            await self._stack.enter_async_context(target)
            models.append(await self._ask_once(name, target))
        return models

    async def _ask_once(self, name: str, target: Target) -> str:
        """So that what cannot work is known before the load, and connections are there."""
        try:
            async with asyncio.timeout(self._pace.timeout_s):
                model = await target.get_ready()
                exchange = target.begin(_PROBE_SALT).prepare(_PROBE)
                async with aclosing(exchange.send()) as parts:
                    async for _ in parts:
                        pass
        except AskFailed as error:
            said = error.message[:_MOST_MESSAGE]
            raise TargetUnusable(f"{name}: {said} [{error.kind}]") from error
        except TimeoutError as error:
            raise TargetUnusable(f"{name}: no answer within {self._pace.timeout_s:g} s") from error
        return model

    async def run(self, index: int, salt: int, begin_s: float, watcher: Watcher) -> None:
        """One round with that target. Cancelling ends what runs, of which the watcher is told."""
        begin = partial(self._targets[index][1].begin, salt)
        generator = Generator(begin, self._pace, watcher)
        sampling = asyncio.create_task(_sample(watcher))
        try:
            await generator.run(self._workload(), begin_s)
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})


async def _sample(watcher: Watcher) -> None:
    """How busy this thread is. More than one it cannot use: Python computes on one at a time."""
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
