"""One run of a stack under load while a schedule of faults happens: `live_through`."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from splitserve_client import SplitserveError
from tests.contract.stranger.process import poll
from tests.support.chaos.asks import ASKS, Ways, answers_of
from tests.support.chaos.faults import End, Moment, Schedule
from tests.support.chaos.load import Load, StreamPause
from tests.support.chaos.network import Network
from tests.support.chaos.stack import Stack, running_stack
from tests.support.processes.patience import PATIENCE_S

# A fault that lets no token through ends by the clock.
_LONGEST_FAULT_S = 4.0
# Of a history of many faults on a machine with much other work.
_LONGEST_HISTORY_S = 1500.0
# "Streams pause for 5 s plus a recompute" (docs/operations.md, "Several schedulers").
_PROMISED_S = 5.0
# Executors that are left have more to do, and the machine may have, too.
_SLOWER, _LEAST_RECOMPUTE_S = 4, 10.0
# gRPC opens and closes some when it likes.
_NUM_SPARE_FILES = 4


class HistoryFailed(Exception):
    """What went wrong is its cause; its text says how to have it again."""


@dataclass(frozen=True, slots=True)
class FaultTime:
    """When a fault began and ended. `leaves_others`: streams need not wait for its end."""

    began_s: float
    ended_s: float
    leaves_others: bool

    def allowed_s(self, pause: StreamPause) -> float:
        """How long `pause` may be for this fault."""
        common_s = min(self.ended_s, pause.until_s) - max(self.began_s, pause.since_s)
        if common_s < 0:
            return 0.0
        return _PROMISED_S if self.leaves_others else common_s + _PROMISED_S


@dataclass(frozen=True, slots=True)
class Chaos:
    """A stack that has answered everything once, and what it answered, and how long that took."""

    stack: Stack
    ways: Sequence[Ways]
    truth: dict[str, object]
    files: dict[str, int]
    # Seconds in which all of it was computed undisturbed.
    undisturbed_s: float

    async def live_through(self, schedule: Schedule) -> Load:
        """Runs the load while `schedule` happens. Raises HistoryFailed."""
        load, faults = Load(ASKS, self.truth, self.ways), list[FaultTime]()
        try:
            async with asyncio.timeout(_LONGEST_HISTORY_S), asyncio.TaskGroup() as tasks:
                running = tasks.create_task(load.run(random.Random(schedule.seed)))
                await self._happen(schedule, load, faults)
                await self.stack.start_missing()
                await self.stack.wait_ready()
                load.finish()
                await running
            await wait_for_nothing(self.stack, self.files)
            assert self.stack.crashes == [], self.stack.crashes
            self._check_pauses(load, faults)
        except (Exception, ExceptionGroup) as error:
            raise await _failure(self.stack, str(schedule), error) from error
        return load

    def _check_pauses(self, load: Load, faults: list[FaultTime]) -> None:
        """Each fault may cost a recompute; that takes at most as long as computing everything."""
        recompute_s = max(_SLOWER * self.undisturbed_s, _LEAST_RECOMPUTE_S)
        for pause in load.pauses:
            allowed_s = (fault.allowed_s(pause) for fault in faults)
            longest_s = recompute_s + sum(each_s + recompute_s for each_s in allowed_s if each_s)
            pause_s = pause.until_s - pause.since_s
            assert pause_s <= longest_s, (
                f"{pause.name} paused for {pause_s:.1f} s; allowed: {longest_s:.1f}"
            )

    async def _happen(self, schedule: Schedule, load: Load, faults: list[FaultTime]) -> None:
        locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        async with asyncio.TaskGroup() as tasks:
            for moment in schedule.moments:
                await _reach(load, moment.begins_at)
                tasks.create_task(self._one(moment, load, locks, faults))

    async def _one(
        self,
        moment: Moment,
        load: Load,
        locks: dict[str, asyncio.Lock],
        faults: list[FaultTime],
    ) -> None:
        async with AsyncExitStack() as held:
            for name in sorted(moment.fault.victims):
                await held.enter_async_context(locks[name])
            began_s = time.monotonic()
            await moment.fault.begin(self.stack)
            leaves_others = isinstance(moment.fault, End) and bool(moment.fault.spared)
            if leaves_others:
                await load.wait_gone_on()
            else:
                await _reach(load, load.meter.num_tokens + moment.num_tokens)
            await moment.fault.end(self.stack)
            faults.append(FaultTime(began_s, time.monotonic(), leaves_others))


async def _reach(load: Load, num_tokens: int) -> None:
    """Waits for so many tokens, or for as long as a fault may last."""
    waiting = asyncio.ensure_future(load.meter.wait_until(num_tokens))
    await asyncio.wait([waiting], timeout=_LONGEST_FAULT_S)
    waiting.cancel()


async def _failure(stack: Stack, what: str, error: BaseException) -> HistoryFailed:
    """With all that is to be seen of the stack."""
    try:
        executors = str(await stack.executor_lists())
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
        async with AsyncExitStack() as sessions:
            ways = [
                Ways(client, await sessions.enter_async_context(client.session()), http)
                for client, http in zip(stack.clients, stack.https, strict=True)
            ]
            try:
                began_s = time.monotonic()
                truth = await answers_of(ASKS, ways)
                undisturbed_s = time.monotonic() - began_s
                await stack.wait_idle()
            except Exception as error:
                raise await _failure(stack, "undisturbed", error) from error
            yield Chaos(stack, ways, truth, files_of(stack), undisturbed_s)
        codes = await stack.stop_all()
        assert set(codes.values()) == {0}, codes
        await wait_for_no_process(stack)
        found = complaints(stack)
        assert not found, "\n".join(found)


# -- what processes hold, and which are left -------------------------------------------------------


def files_of(stack: Stack) -> dict[str, int]:
    """How many files each process has open."""
    return {name: len(os.listdir(f"/proc/{stack.pid(name)}/fd")) for name in stack.processes}


async def wait_for_nothing(stack: Stack, before: dict[str, int]) -> None:
    """Waits until no request, block and file is left. Raises TimeoutError."""
    await stack.wait_idle()
    # Who was at another scheduler for a while stays connected to both.
    num_spare = _NUM_SPARE_FILES + stack.num_executors + 2 * len(stack.clients)

    async def look() -> tuple[bool, object]:
        found = files_of(stack)
        left = {
            name: (num_files, before[name])
            for name, num_files in found.items()
            if num_files > before[name] + num_spare
        }
        return not left, left

    await poll(look, PATIENCE_S)


async def wait_for_no_process(stack: Stack) -> None:
    """Waits until no process lives that any of the stack began. Raises TimeoutError."""

    async def look() -> tuple[bool, object]:
        left = [line for line in map(_session_of, os.listdir("/proc")) if line[0] in stack.sessions]
        return not left, left

    await poll(look, PATIENCE_S)


def _session_of(name: str) -> tuple[int, str]:
    """Of a process that lives; 0 if it does not, or is none."""
    try:
        line = Path("/proc", name, "stat").read_text()
    except OSError:
        return 0, ""
    # The name of a program, in parentheses, may hold anything.
    state, _parent, _group, session = line.rpartition(")")[2].split()[:4]
    return (0 if state in "ZX" else int(session)), line


def complaints(stack: Stack) -> list[str]:
    """What the logs say that no fault of others excuses."""
    return [
        f"{name}: {line}"
        for name in stack.processes
        for line in stack.log(name).read_text(errors="replace").splitlines()
        if any(sign in line for sign in _BUGS)
        or (" ERROR " in line and not any(event in line for event in _EXCUSED))
    ]


_BUGS = ("was destroyed but", "never retrieved", "never awaited", "INVARIANT_BROKEN")
# The disk was full; a request was as deadly as it was meant to be; an executor as sick.
_EXCUSED = (
    " journal_stopped ",
    " request_kills_executors ",
    " executor_withdrawn ",
    " step_failed ",
)
