"""One history of a cluster, all of which follows from its seed, and what must hold in any."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from unittest import mock

import grpc.aio

from scheduler_service.config import ClusterConfig
from scheduler_service.core.config import BatchPolicyName, PolicyConfig, PreemptionMode
from scheduler_service.core.policies.queue_policy import QUEUE_POLICIES
from tests.simulation.calls import opener
from tests.simulation.client_process import SimulatedClient
from tests.simulation.executor_process import ExecutorShape, SimulatedExecutor
from tests.simulation.faults import Fault, World, random_fault
from tests.simulation.network import Network
from tests.simulation.rules import problems_of_end, problems_of_outcomes, problems_of_rest
from tests.simulation.scheduler_process import SimulatedScheduler
from tests.simulation.virtual_loop import Stuck, VirtualLoop, new_loop, process_name
from tests.simulation.workload import EOS, MOST_TOKENS, random_requests

# Virtual seconds: for faults, and then for everything to come to its end.
_REQUESTS_S = 2.0
_FAULTS_S = 16.0
_PATIENCE_S = 300.0
_SETTLE_S = 60.0
_LASTING_S = (0.01, 0.5, 3.0, 8.0)

Note = Callable[[str], None]


@dataclass(slots=True)
class History:
    """What happened. `problems`: what must not be; none if all is well."""

    seed: int
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_calls: int = 0
    virtual_s: float = 0.0

    @property
    def report(self) -> str:
        """For people."""
        replay = f"replay: PYTHONHASHSEED=0 python -m tests.simulation {self.seed}"
        return "\n".join([*self.lines, "", *self.problems, replay])


def run_history(
    seed: int, *, faults: Sequence[Fault] | None = None, is_verbose: bool = False
) -> History:
    """The history of `seed`. `faults`: those that happen, in place of what the seed would draw.

    `is_verbose`: with all that the services log.
    """
    history = History(seed)
    loop = new_loop()

    def note(text: str) -> None:
        history.lines.append(f"{loop.time():10.6f} {process_name() or 'world':>10} {text}")

    # What depends on when garbage is collected would not happen again.
    gc.disable()
    try:
        with _logged(note, history, is_verbose=is_verbose):
            story = _Story(loop, Random(seed), faults, note)
            with mock.patch.object(grpc.aio, "insecure_channel", opener(story.network)):
                try:
                    history.problems += loop.run_until_complete(story.run())
                except Stuck as stuck:
                    history.problems += [f"stuck: {stuck}", *story.describe()]
            history.problems += [f"unexpected: {error}" for error in loop.errors]
            history.num_calls, history.virtual_s = loop.num_calls, loop.time()
            loop.close()
            del story
    finally:
        gc.enable()
    return history


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


# What services log as errors when faults that the simulation asks for happen.
_EXPECTED = ("step_failed",)


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
        self, loop: VirtualLoop, random: Random, faults: Sequence[Fault] | None, note: Note
    ) -> None:
        self._random = random
        self._faults = faults
        self.network = Network(loop, random)
        scheduler = SimulatedScheduler(loop, self.network, "10.0.0.1", _random_config(random))
        num_blocks_of_tokens = MOST_TOKENS + random.choice([32, 64, 400])
        executors = [
            SimulatedExecutor(
                loop,
                self.network,
                random,
                f"10.0.1.{number}",
                scheduler.address,
                _random_shape(random, num_blocks_of_tokens),
            )
            for number in range(random.choice([1, 2, 2, 3]))
        ]
        wanted = random_requests(random, random.choice([2, 3, 4, 6, 8]), _REQUESTS_S)
        num_clients = random.choice([1, 2, 3])
        clients = [
            SimulatedClient(
                loop, random, f"10.0.2.{number}", scheduler.address, wanted[number::num_clients]
            )
            for number in range(num_clients)
        ]
        self._world = World(self.network, random, scheduler, executors, clients, note)

    async def run(self) -> list[str]:
        """The whole story; returns what must not be."""
        world = self._world
        world.scheduler.start()
        for executor in world.executors:
            executor.start()
        await asyncio.sleep(0.4)
        asking = [client.start() for client in world.clients]
        await self._go_wrong()
        world.calm()
        done, waiting = await asyncio.wait(asking, timeout=_PATIENCE_S)
        if waiting:
            return ["clients wait for ever", *self.describe()]
        for task in done:
            task.result()
        problems = problems_of_outcomes(world)
        await asyncio.sleep(_SETTLE_S)
        problems += problems_of_rest(world)
        await self._end()
        return problems + problems_of_end(world)

    def describe(self) -> list[str]:
        """How far everybody is."""
        outcomes = [outcome for client in self._world.clients for outcome in client.outcomes]
        return [outcome.describe() for outcome in outcomes]

    async def _go_wrong(self) -> None:
        random, world = self._random, self._world
        faults = self._faults
        if faults is None:
            faults = [random_fault(random) for _ in range(random.choice([0, 1, 2, 3, 5, 8]))]

        async def happen(fault: Fault, at_s: float, lasting_s: float) -> None:
            await asyncio.sleep(at_s)
            await fault(world, random, lasting_s)

        tasks = [
            asyncio.ensure_future(
                happen(fault, random.random() * 2 * _REQUESTS_S, random.choice(_LASTING_S))
            )
            for fault in faults
        ]
        await asyncio.sleep(_FAULTS_S)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _end(self) -> None:
        """Everybody ends as by SIGTERM."""
        world = self._world
        assert world.scheduler.process is not None
        await world.scheduler.process.start(world.scheduler.drain())
        for executor in world.executors:
            executor.stop()
        await asyncio.sleep(_SETTLE_S)


def _random_config(random: Random) -> ClusterConfig:
    return ClusterConfig(
        max_num_seqs=random.choice([4, 8, 256]),
        max_num_batched_tokens=random.choice([8, 32, 256]),
        max_num_waiting=random.choice([4, 1024, 1024]),
        pipeline_depth=random.choice([1, 2, 2, 4]),
        reconnect_timeout_s=random.choice([0.2, 2.0]),
        step_timeout_s=random.choice([1.0, 5.0]),
        policies=PolicyConfig(
            prefix_caching=random.random() < 0.8,
            host_prefix_cache=random.random() < 0.5,
            num_lookahead_slots=random.choice([0, 0, 3]),
            preemption_mode=random.choice(list(PreemptionMode)),
            batch_policy=random.choice(list(BatchPolicyName)),
            queue_policy=random.choice(sorted(QUEUE_POLICIES)),
            tenant_weights={"heavy": 2.0},
        ),
    )


def _random_shape(random: Random, num_tokens: int) -> ExecutorShape:
    block_size = random.choice([1, 3, 4, 16])
    # A sequence may leave a part of a block empty, and the first of several are shared.
    num_blocks = num_tokens // block_size + 8
    return ExecutorShape(
        block_size=block_size,
        num_device_blocks=num_blocks,
        num_host_blocks=random.choice([0, num_blocks // 2, num_blocks]),
        step_s=random.choice([0.02, 0.1, 0.3]),
        byte_s=random.choice([0.0, 1e-4]),
        max_inflight_steps=random.choice([1, 2, 4]),
        eos_token_ids=EOS,
    )
