"""One run of a stack under load while a schedule of faults happens: `live_through`."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from splitserve_client import SplitserveError
from tests.support.chaos.asks import ASKS, Ways, answers_of
from tests.support.chaos.leftovers import (
    complaints,
    files_of,
    wait_for_no_process,
    wait_for_nothing,
)
from tests.support.chaos.load import Load
from tests.support.chaos.network import Network
from tests.support.chaos.schedule import Moment, Schedule
from tests.support.chaos.stack import Stack, running_stack

# A fault that lets no token through ends by the clock.
_LONGEST_FAULT_S = 4.0
# Of a history of many faults on a machine with much other work.
_LONGEST_HISTORY_S = 1500.0


class HistoryFailed(Exception):
    """What went wrong is its cause; its text says how to have it again."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """A stack that has answered everything once, and what it answered."""

    stack: Stack
    ways: Ways
    truth: dict[str, object]
    files: dict[str, int]

    async def live_through(self, schedule: Schedule) -> Load:
        """Runs the load while `schedule` happens. Raises HistoryFailed."""
        load = Load(ASKS, self.truth, self.ways)
        try:
            async with asyncio.timeout(_LONGEST_HISTORY_S), asyncio.TaskGroup() as tasks:
                running = tasks.create_task(load.run(random.Random(schedule.seed)))
                await self._happen(schedule, load)
                await self.stack.start_missing()
                await self.stack.wait_ready()
                load.finish()
                await running
            await wait_for_nothing(self.stack, self.files)
            assert self.stack.crashes == []
        except (Exception, ExceptionGroup) as error:
            raise await _failure(self.stack, str(schedule), error) from error
        return load

    async def _happen(self, schedule: Schedule, load: Load) -> None:
        locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        async with asyncio.TaskGroup() as tasks:
            for moment in schedule.moments:
                await _reach(load, moment.begins_at)
                tasks.create_task(self._one(moment, load, locks))

    async def _one(self, moment: Moment, load: Load, locks: dict[str, asyncio.Lock]) -> None:
        async with AsyncExitStack() as held:
            for name in sorted(moment.fault.victims):
                await held.enter_async_context(locks[name])
            await moment.fault.begin(self.stack)
            await _reach(load, load.meter.num_tokens + moment.num_tokens)
            await moment.fault.end(self.stack)


async def _reach(load: Load, num_tokens: int) -> None:
    """Waits for so many tokens, or for as long as a fault may last."""
    waiting = asyncio.ensure_future(load.meter.wait_until(num_tokens))
    await asyncio.wait([waiting], timeout=_LONGEST_FAULT_S)
    waiting.cancel()


async def _failure(stack: Stack, what: str, error: BaseException) -> HistoryFailed:
    """With all that is to be seen of the stack."""
    try:
        executors = str(await stack.operator.list_executors())
    except SplitserveError as silence:
        executors = repr(silence)
    logs = "\n".join(_last_lines(stack, name) for name in stack.processes)
    return HistoryFailed(f"{what}\n{logs}\n{executors}\n{error!r}")


def _last_lines(stack: Stack, name: str) -> str:
    lines = stack.log(name).read_text(errors="replace").splitlines()
    return "\n".join(f"{name}: {line}" for line in lines[-12:])


@asynccontextmanager
async def chaos(network: Network, folder: Path, *scheduler_options: str) -> AsyncIterator[Chaos]:
    """A stack to do harm to. Afterwards asserts that all of it ends as it was asked to."""
    async with running_stack(network, folder, *scheduler_options) as stack:
        async with stack.client.session() as session:
            ways = Ways(stack.client, session, stack.http)
            try:
                truth = await answers_of(ASKS, ways)
                await stack.wait_idle()
            except Exception as error:
                raise await _failure(stack, "undisturbed", error) from error
            yield Chaos(stack, ways, truth, files_of(stack))
        codes = await stack.stop()
        assert set(codes.values()) == {0}, codes
        await wait_for_no_process(stack)
        found = complaints(stack)
        assert not found, "\n".join(found)
