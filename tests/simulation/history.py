"""One history of a cluster, all of which follows from its seed, and what must hold in any."""

from __future__ import annotations

import asyncio
import gc
import logging
import random as random_module
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest import mock

import grpc.aio

from splitserve_common import StaticDiscovery
from tests.simulation.calls import opener
from tests.simulation.client_process import SimulatedClient
from tests.simulation.executor_process import SimulatedExecutor
from tests.simulation.faults import Fault, World, sicken
from tests.simulation.gateway_process import SimulatedGateway
from tests.simulation.liveness import LivenessWatch
from tests.simulation.network import Network
from tests.simulation.rules import (
    problems_of_end,
    problems_of_journals,
    problems_of_lives,
    problems_of_outcomes,
    problems_of_rest,
)
from tests.simulation.scenario import FAULTS_S, Draw, Scenario, disturbed, random_scenario
from tests.simulation.scheduler_process import SimulatedScheduler
from tests.simulation.virtual_loop import Stuck, VirtualLoop, new_loop, process_name

# Virtual seconds: for faults that have begun, then for everything to be found again, and to come to
# its end.
_LAST_FAULT_S = 12.0
_RECOVERY_S = 60.0
_PATIENCE_S = 300.0
# Until the last connection is found dead, and the last executor has gone back to whom it prefers.
_SETTLE_S = 45.0
_END_S = 20.0
_LASTING_S = (0.01, 0.5, 3.0, 8.0)

Note = Callable[[str], None]


@dataclass(slots=True)
class History:
    """What happened. `problems`: what must not be; none if all is well."""

    seed: int
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_calls: int = 0

    @property
    def report(self) -> str:
        """For people."""
        replay = f"replay: PYTHONHASHSEED=0 python -m tests.simulation {self.seed}"
        return "\n".join([*self.lines, "", *self.problems, replay])


def run_history(
    seed: int,
    *,
    draw: Draw = random_scenario,
    faults: Sequence[Fault] | None = None,
    is_verbose: bool = False,
) -> History:
    """The history of `seed`. `draw`: what it begins with. `faults`: those that happen.

    `is_verbose`: with all that the services log.
    """
    if faults is not None:
        draw = partial(disturbed, faults=faults)
    history = History(seed)
    loop = new_loop()

    def note(text: str) -> None:
        history.lines.append(f"{loop.time():10.6f} {process_name() or 'world':>10} {text}")

    # What depends on when garbage is collected would not happen again.
    gc.disable()
    # The client shuffles schedulers by it.
    state = random_module.getstate()
    random_module.seed(seed)
    try:
        with _logged(note, history, is_verbose=is_verbose):
            random = Random(seed)
            scenario = draw(random)
            with _journal_folder(scenario) as folder:
                story = _Story(loop, random, scenario, note, folder)
                with mock.patch.object(grpc.aio, "insecure_channel", opener(story.network)):
                    try:
                        history.problems += loop.run_until_complete(story.run())
                    except Stuck as stuck:
                        history.problems += [f"stuck: {stuck}", *story.describe()]
                history.problems += problems_of_journals(folder)
            history.problems += [f"unexpected: {error}" for error in loop.errors]
            history.num_calls = loop.num_calls
            loop.close()
            del story
    finally:
        random_module.setstate(state)
        gc.enable()
    return history


def examine(seed: int) -> tuple[str, float]:
    """What is wrong with a history, empty if nothing is; and the CPU seconds that it took."""
    started_s = time.process_time()
    problems = "; ".join(run_history(seed).problems)
    return f"seed {seed}: {problems}" if problems else "", time.process_time() - started_s


@contextmanager
def _journal_folder(scenario: Scenario) -> Iterator[Path | None]:
    if not scenario.records:
        yield None
        return
    with TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def _logged(note: Note, history: History, *, is_verbose: bool) -> Iterator[None]:
    handler = _Handler(note, history)
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = [handler]
    root.setLevel(logging.DEBUG if is_verbose else logging.ERROR)
    logging.disable(logging.NOTSET if is_verbose else logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        root.handlers = handlers
        root.setLevel(level)


# What services log as errors when faults that the simulation asks for happen. Whether a request may
# have failed is told by its client.
_EXPECTED = (
    "step_failed",
    "run_cut_short",
    "drafts_left_out",
    "request_kills_executors",
    "executor_withdrawn",
    "executor_failing",
)


class _Handler(logging.Handler):
    """Logs are lines of the history; an error that nobody asked for is a problem."""

    def __init__(self, note: Note, history: History) -> None:
        super().__init__()
        self._note = note
        self._history = history
        self._format = logging.Formatter("%(levelname)s %(name)s %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        line = self._format.format(record)
        self._note(line)
        if record.levelno >= logging.ERROR and not record.getMessage().startswith(_EXPECTED):
            self._history.problems.append(f"logged: {line}")


class _Story:
    """Sets the world up, lets it go wrong, and looks at the end of it."""

    def __init__(
        self,
        loop: VirtualLoop,
        random: Random,
        scenario: Scenario,
        note: Note,
        journal_folder: Path | None,
    ) -> None:
        self._random = random
        self._faults, self._check = scenario.faults, scenario.check
        self.network = Network(loop, random)
        hosts = [f"10.0.0.{number + 1}" for number in range(scenario.num_schedulers)]
        schedulers = [
            SimulatedScheduler(loop, self.network, host, scenario.config, journal_folder)
            for host in hosts
        ]
        addresses = tuple(scheduler.address for scheduler in schedulers)
        if len(addresses) > 1:
            for scheduler in schedulers:
                scheduler.peers = addresses
        executors = [
            SimulatedExecutor(loop, self.network, random, f"10.0.1.{number}", addresses, shape)
            for number, shape in enumerate(scenario.shapes)
        ]
        known = StaticDiscovery(addresses)
        clients = [
            SimulatedGateway(loop, random, f"10.0.2.{number}", known, wanted)
            if scenario.is_through_gateways
            else SimulatedClient(loop, random, f"10.0.2.{number}", ",".join(addresses), wanted)
            for number, wanted in enumerate(scenario.wanted)
        ]
        self._world = World(self.network, random, schedulers, executors, clients, note)
        self._world.has_other_faults = any(fault is not sicken for fault in scenario.faults)
        self._watch = LivenessWatch(self._world)

    async def run(self) -> list[str]:
        """The whole story; returns what must not be."""
        world = self._world
        for scheduler in world.schedulers:
            scheduler.start()
        for executor in world.executors:
            executor.start()
        await asyncio.sleep(0.4)
        asking = [client.start() for client in world.clients]
        if self._faults:
            await self._go_wrong()
        world.calm()
        done, waiting = await asyncio.wait(asking, timeout=_RECOVERY_S if self._faults else 0.0)
        if waiting:
            watching = asyncio.ensure_future(self._watch.run())
            done, waiting = await asyncio.wait(asking, timeout=_PATIENCE_S)
            watching.cancel()
        if waiting:
            problems = [*self._watch.problems, "clients wait for ever", *self.describe()]
            await self._give_up()
            return problems
        for task in done:
            task.result()
        problems = self._watch.problems + problems_of_outcomes(world) + self._check(world)
        await asyncio.sleep(_SETTLE_S)
        problems += problems_of_rest(world)
        problems += problems_of_lives(world)
        await self._end()
        return problems + problems_of_end(world)

    def describe(self) -> list[str]:
        """How far everybody is."""
        outcomes = [outcome for client in self._world.clients for outcome in client.outcomes]
        return [outcome.describe() for outcome in outcomes]

    async def _go_wrong(self) -> None:
        random, world = self._random, self._world

        async def happen(fault: Fault, at_s: float, lasting_s: float) -> None:
            await asyncio.sleep(at_s)
            await fault(world, random, lasting_s)

        tasks = [
            asyncio.ensure_future(
                happen(fault, random.random() * FAULTS_S, random.choice(_LASTING_S))
            )
            for fault in self._faults
        ]
        await asyncio.sleep(FAULTS_S + _LAST_FAULT_S)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _give_up(self) -> None:
        """Nothing is left that is in the midst of something."""
        for process in [client.process for client in self._world.clients]:
            process.kill()
        for scheduler in self._world.schedulers:
            scheduler.kill()
        for executor in self._world.executors:
            executor.kill()
        await asyncio.sleep(1.0)

    async def _end(self) -> None:
        """Everybody ends as by SIGTERM."""
        world = self._world
        for scheduler in world.schedulers:
            scheduler.stop()
        for executor in world.executors:
            executor.stop()
        await asyncio.sleep(_END_S)
