"""A simulated executor: the real servicer, membership and step contract, without a model.

Its tokens follow from what its KV blocks really hold (`FakeRunner`). Steps take virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from random import Random

from executor_service.service import (
    Departures,
    ExecutorLives,
    ExecutorServicer,
    GrpcRegistry,
    Membership,
    Pacing,
    ReadyExecutor,
    Registrar,
)
from executor_service.steps import (
    SAMPLING_FEATURES,
    ExecutorInfo,
    ExecutorLimits,
    Feature,
    Grammar,
    ModelInfo,
    StepExecutor,
    StepInput,
    TrialStep,
)
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_common import StaticDiscovery
from tests.simulation.network import Network
from tests.simulation.servers import Server
from tests.simulation.virtual_loop import Process, VirtualLoop
from tests.simulation.virtual_worker import Mood, Pace, VirtualWorker
from tests.support.fakes.fake_model import VOCAB_SIZE
from tests.support.fakes.fake_runner import FakeRunner, StepFault, cut_at_random

DIGEST = "fa4e" * 16
MAX_MODEL_LEN = 256
# When virtual time begins, in nanoseconds since 1970.
BEGINNING_NS = 1_800_000_000 * 10**9
_FEATURES = SAMPLING_FEATURES | {Feature.GRAMMAR}
_DRAIN_GRACE_S = 1.0
_LEAVE_TIMEOUT_S = 5.0
_MOVE_AFTER_S = 4.0


@dataclass(frozen=True, slots=True)
class ExecutorShape:
    """What kind of machine it is.

    A step takes `step_s`, `pass_s` for each token that its rows may run on for, and `byte_s` for
    each byte of its batch; to compile a grammar takes it `compile_s`. `num_words`: how many its
    model knows, None for all tokens; the same for all. `brings_several`: tokens in one step;
    `cuts_short`: fewer than it may, now and then. `reports_parts`: it tells them as they come.
    """

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    step_s: float
    byte_s: float
    compile_s: float
    max_inflight_steps: int
    eos_token_ids: tuple[int, ...]
    num_words: int | None = None
    pass_s: float = 0.0
    brings_several: bool = False
    cuts_short: bool = False
    reports_parts: bool = False


@dataclass(slots=True)
class SimulatedExecutor:
    """One address, and the lives there. `violations`: what its rows read that was not theirs."""

    loop: VirtualLoop
    network: Network
    random: Random
    host: str
    schedulers: tuple[str, ...]
    shape: ExecutorShape
    mood: Mood = field(default_factory=Mood)
    violations: list[str] = field(default_factory=list)
    process: Process | None = None
    processes: list[Process] = field(default_factory=list)
    _is_wanted: bool = False
    _stop: asyncio.Event | None = None
    _worker: VirtualWorker | None = None
    _compiled_at_s: dict[Grammar, float] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """`host:port`; the same in every life."""
        return f"{self.host}:50052"

    def start(self) -> None:
        """Begins a life, if need be when the last has ended: a new epoch, empty pools."""
        self._is_wanted = True
        if self.process is None:
            self.mood = Mood()
            self.process = Process(self.loop, self.host)
            self.processes.append(self.process)
            self.process.start(self._live(self.process))

    def kill(self, *, is_silent: bool = False) -> None:
        """As SIGKILL; `is_silent`: as if its machine went with it."""
        self._is_wanted = False
        process, self.process = self.process, None
        if process is not None:
            self.network.let_go(process, is_silent=is_silent)
            process.kill()

    def stop(self) -> None:
        """As SIGTERM: it leaves its scheduler, and ends by itself."""
        if self.process is not None and self._stop is not None:
            self._is_wanted = False
            self._stop.set()

    async def _live(self, process: Process) -> None:
        self._stop = stop = asyncio.Event()
        self._compiled_at_s = {}
        info = self._info()
        steps = StepExecutor(info, self._runner(info), self._now_ns)
        shape, servicer = self.shape, ExecutorServicer()
        worker = VirtualWorker(
            self.loop, steps, Pace(shape.step_s, shape.pass_s, shape.byte_s, self.mood)
        )
        self._worker = worker
        departures = Departures(GrpcRegistry, servicer, _LEAVE_TIMEOUT_S)
        lives = ExecutorLives(
            info,
            self._address_for,
            departures,
            worker,  # type: ignore[arg-type]
            servicer.streams,
            self._now_ns,
        )
        servicer.serve(ReadyExecutor(worker, lambda: worker.describe(lives.info)))  # type: ignore[arg-type]
        server = Server(self.network, self.address)
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server)
        server.start()
        membership = self._membership(lives, servicer)
        tasks = [asyncio.create_task(work) for work in self._works(worker, membership)]
        await stop.wait()
        for task in tasks[1:]:
            task.cancel()
        if membership.scheduler is not None:
            await lives.leave(membership.scheduler)
        await servicer.drain()
        await server.stop(_DRAIN_GRACE_S)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.network.let_go(process, is_silent=False)
        if self.process is process:
            self.process = None
            if self._is_wanted:
                self.start()

    def _membership(self, lives: ExecutorLives, servicer: ExecutorServicer) -> Membership:
        pacing = Pacing(random=self.random.random, now_ns=self._now_ns, clock=self.loop.time)
        return Membership(
            StaticDiscovery(self.schedulers),
            self.address,
            GrpcRegistry,
            lives,
            servicer.streams,
            pacing,
            move_after_s=_MOVE_AFTER_S,
        )

    def _works(
        self, worker: VirtualWorker, membership: Membership
    ) -> list[Coroutine[None, None, None]]:
        """What goes on as long as it lives, steps first."""
        registrar = Registrar(
            membership,
            membership.describe,
            membership.wait_unwatched,
            worker.adopt_scheduler_epoch,
            Pacing(random=self.random.random, now_ns=self._now_ns, clock=self.loop.time),
        )
        works = [worker.run(), registrar.run()]
        # With one there is nothing to prefer.
        if len(self.schedulers) == 1:
            return works
        return [*works, membership.keep_preferred(), membership.keep_answered()]

    async def _address_for(self, _scheduler: str) -> str:
        return self.address

    def _runner(self, info: ExecutorInfo) -> FakeRunner:
        runner = FakeRunner(
            block_size=info.block_size,
            num_device_blocks=info.num_device_blocks,
            num_host_blocks=info.num_host_blocks,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=self.shape.eos_token_ids,
            fault=self._fault,
        )
        runner.violations = self.violations
        runner.num_words = self.shape.num_words
        if self.shape.cuts_short:
            runner.cut = cut_at_random
        return runner

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

    @property
    def _features(self) -> set[Feature]:
        if not self.shape.brings_several:
            return set()
        parts = {Feature.PARTIAL_RESULTS} if self.shape.reports_parts else set()
        return {Feature.SEVERAL_TOKENS} | parts

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
            features=_FEATURES | self._features,
            software_version="simulated",
            trial_step=TrialStep(
                MAX_MODEL_LEN, MAX_MODEL_LEN**2, round((shape.step_s + shape.byte_s) * 1e6)
            ),
        )
