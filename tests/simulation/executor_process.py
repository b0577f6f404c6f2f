"""A simulated executor: the real servicer, registration and step contract, without a model.

Its tokens follow from what its KV blocks really hold (`FakeRunner`). Steps take virtual time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from executor_service.service.decode_batch import decode_batch
from executor_service.service.encode_answer import encode_answer
from executor_service.service.registration import GrpcRegistry, Pacing, Registrar
from executor_service.service.servicer import ExecutorServicer, ReadyExecutor
from executor_service.steps.batch import StepAnswer
from executor_service.steps.executor_info import (
    SAMPLING_FEATURES,
    ExecutorInfo,
    ExecutorLimits,
    Feature,
    ModelInfo,
)
from executor_service.steps.sampling_params import Grammar
from executor_service.steps.step import StepInput
from executor_service.steps.step_executor import StepExecutor
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from tests.simulation.network import Network
from tests.simulation.servers import Server
from tests.simulation.virtual_loop import Process, VirtualLoop
from tests.support.fakes.fake_runner import FakeRunner, StepFault
from tests.support.fakes.fake_truth import VOCAB_SIZE

DIGEST = "fa4e" * 16
MAX_MODEL_LEN = 256
# When virtual time begins, in nanoseconds since 1970.
BEGINNING_NS = 1_800_000_000 * 10**9
_DRAIN_GRACE_S = 1.0
# How soon a step notices that its executor is slow, or no longer.
_SLICE_S = 0.25

# Changes a result before it is sent; it is told which seeds had rows in that step.
Spoil = Callable[[pb.StepResult, list[int]], None]
Job = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ExecutorShape:
    """What kind of machine it is.

    A step takes `step_s`, and `byte_s` for each byte of its batch; to compile a grammar takes it
    `compile_s`.
    """

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    step_s: float
    byte_s: float
    compile_s: float
    max_inflight_steps: int
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class Mood:
    """What is wrong with it at present. `slowness`: how many times longer a step takes."""

    slowness: float = 1.0
    fault: Callable[[StepInput], StepFault] = lambda _step: StepFault()
    spoil: Spoil = lambda _result, _seeds: None


class VirtualWorker:
    """Stands for `StepWorker`: steps in their order, each of which takes its time."""

    def __init__(self, loop: VirtualLoop, steps: StepExecutor, executor: SimulatedExecutor) -> None:
        self._loop = loop
        self._steps = steps
        self._executor = executor
        self._jobs: deque[tuple[float, Job]] = deque()
        self._received_s: deque[float] = deque()
        self._wakeup = asyncio.Event()
        self.seeds: list[int] = []

    def describe(self, info: ExecutorInfo) -> ExecutorInfo:
        """See StepWorker."""
        running_s = self._loop.time() - self._received_s[0] if self._received_s else 0.0
        return replace(
            info,
            newest_scheduler_epoch=self._steps.scheduler_epoch,
            step_running_ms=int(running_s * 1000),
        )

    def submit(
        self, batch: pb.ScheduleBatch, then: Callable[[Callable[[], pb.StepResult]], None]
    ) -> None:
        """See StepWorker."""
        decoded = decode_batch(batch)
        self._received_s.append(self._loop.time())

        def answer(answered: StepAnswer) -> None:
            self._received_s.popleft()
            result = encode_answer(answered)
            self._executor.mood.spoil(result, self.seeds)
            then(lambda: result)

        def begin() -> None:
            self.seeds = []
            self._steps.begin(decoded, answer)
            self._steps.finish()

        num_bytes = batch.ByteSize()
        shape = self._executor.shape
        self._put(shape.step_s + shape.byte_s * num_bytes, begin)

    def adopt_scheduler_epoch(self, scheduler_epoch: int) -> None:
        """See StepWorker."""
        self._put(0.0, lambda: self._steps.adopt_scheduler_epoch(scheduler_epoch))

    def finish(self) -> None:
        """See StepWorker; what is left takes no time."""
        while self._jobs:
            self._jobs.popleft()[1]()

    def _put(self, duration_s: float, job: Job) -> None:
        self._jobs.append((duration_s, job))
        self._wakeup.set()

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            while self._jobs:
                entry = self._jobs[0]
                await self._work(entry[0])
                # Unless it was finished meanwhile.
                if self._jobs and self._jobs[0] is entry:
                    self._jobs.popleft()[1]()
            self._wakeup.clear()
            if not self._jobs:
                await self._wakeup.wait()

    async def _work(self, work_s: float) -> None:
        """What takes so long if nothing is wrong; that may change at any time."""
        while work_s > 0:
            slowness = self._executor.mood.slowness
            slice_s = min(work_s * slowness, _SLICE_S)
            await asyncio.sleep(slice_s)
            work_s -= slice_s / slowness + 1e-9


@dataclass(slots=True)
class SimulatedExecutor:
    """One address, and the lives there. `violations`: what its rows read that was not theirs."""

    loop: VirtualLoop
    network: Network
    random: Random
    host: str
    scheduler: str
    shape: ExecutorShape
    mood: Mood = field(default_factory=Mood)
    violations: list[str] = field(default_factory=list)
    process: Process | None = None
    processes: list[Process] = field(default_factory=list)
    _stop: asyncio.Event | None = None
    _worker: VirtualWorker | None = None
    _compiled_at_s: dict[Grammar, float] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """`host:port`; the same in every life."""
        return f"{self.host}:50052"

    def start(self) -> None:
        """Begins a life: a new epoch, empty pools."""
        if self.process is None:
            self.mood = Mood()
            self.process = Process(self.loop, self.host)
            self.processes.append(self.process)
            self.process.start(self._live(self.process))

    def kill(self, *, is_silent: bool = False) -> None:
        """As SIGKILL; `is_silent`: as if its machine went with it."""
        process, self.process = self.process, None
        if process is not None:
            self.network.let_go(process, is_silent=is_silent)
            process.kill()

    def stop(self) -> None:
        """As SIGTERM; a life that ends so ends by itself."""
        if self.process is not None and self._stop is not None and not self.process.is_paused:
            self._stop.set()

    async def _live(self, process: Process) -> None:
        self._stop = asyncio.Event()
        self._compiled_at_s = {}
        info = self._info()
        runner = FakeRunner(
            block_size=info.block_size,
            num_device_blocks=info.num_device_blocks,
            num_host_blocks=info.num_host_blocks,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=self.shape.eos_token_ids,
            fault=self._fault,
        )
        runner.violations = self.violations
        steps = StepExecutor(info, runner, self._now_ns)
        worker = VirtualWorker(self.loop, steps, self)
        self._worker = worker
        servicer = ExecutorServicer()
        servicer.serve(ReadyExecutor(worker, lambda: worker.describe(info)))  # type: ignore[arg-type]
        server = Server(self.network, self.address)
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server)
        server.start()
        pacing = Pacing(random=self.random.random, now_ns=self._now_ns)

        async def describe() -> ExecutorInfo:
            return worker.describe(info)

        registrar = Registrar(
            GrpcRegistry(self.scheduler),
            describe,
            servicer.streams.wait_none_open,
            worker.adopt_scheduler_epoch,
            pacing,
        )
        tasks = [asyncio.create_task(worker.run()), asyncio.create_task(registrar.run())]
        await self._stop.wait()
        tasks[1].cancel()
        await servicer.drain()
        await server.stop(_DRAIN_GRACE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.process is process:
            self.process = None
        self.network.let_go(process, is_silent=False)

    def _fault(self, step: StepInput) -> StepFault:
        assert self._worker is not None
        self._worker.seeds = step.seeds.tolist()
        fault, compiling = self.mood.fault(step), self._compiling(step)
        return replace(fault, unsampled=compiling) if compiling else fault

    def _compiling(self, step: StepInput) -> list[int]:
        """Rows that get no token, as their grammar is not compiled yet; each is begun when seen."""
        now_s, row_ids = self.loop.time(), list[int]()
        for row in range(step.num_rows):
            grammar = step.sampling_params[row].grammar
            if grammar is not None:
                at_s = self._compiled_at_s.setdefault(grammar, now_s + self.shape.compile_s)
                if now_s < at_s:
                    row_ids.append(int(step.row_ids[row]))
        return row_ids

    def _now_ns(self) -> int:
        return BEGINNING_NS + round(self.loop.time() * 1e9)

    def _info(self) -> ExecutorInfo:
        shape = self.shape
        model = ModelInfo(
            name="simulated",
            digest=DIGEST,
            dtype="float32",
            kv_cache_dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=shape.eos_token_ids,
        )
        return ExecutorInfo(
            executor_epoch=self._now_ns() + 1,
            address=self.address,
            model=model,
            block_size=shape.block_size,
            num_device_blocks=shape.num_device_blocks,
            num_host_blocks=shape.num_host_blocks,
            block_bytes=16 * shape.block_size,
            limits=ExecutorLimits(max_inflight_steps=shape.max_inflight_steps),
            features=SAMPLING_FEATURES | {Feature.GRAMMAR},
            software_version="simulated",
        )
