"""An executor without a model, for tests of schedulers: the real servicer around a FakeRunner.

async with FakeExecutor(scheduler_address, block_size=16) as executor:
    ...
    await executor.kill()       # abruptly, as if the process died
    await executor.start()      # a new life at the same address, with empty pools

With Feature.ADAPTERS among its `features` it takes any adapter, with CROSS_ATTENTION encoder
tokens. `start_executor` serves any runner.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from executor_service.service import (
    SERVICE,
    AdapterLoading,
    Departures,
    Encode,
    ExecutorServicer,
    GrpcRegistry,
    Pacing,
    ReadyExecutor,
    Registrar,
    StepWorker,
)
from executor_service.steps import (
    SAMPLING_FEATURES,
    AdapterSupport,
    DefaultSampling,
    ExecutorInfo,
    ExecutorLimits,
    Feature,
    FinishedStep,
    ModelInfo,
    ModelVectors,
    Runner,
    StepExecutor,
    StepInput,
)
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_adapters import AdapterInvalid
from splitserve_contract import DomainError
from splitserve_rpc import OPEN, RunningServer, ServerSecurity, bind_server
from tests.support.fakes.fake_runner import FakeRunner, StepFault, no_fault
from tests.support.fakes.vector_runner import VectorRunner
from tests.support.processes.addresses import reserve_address


class CountingWorker(StepWorker):
    """Step worker that counts the batches it was given."""

    num_submitted = 0

    def submit(
        self,
        batch: pb.ScheduleBatch,
        then: Callable[[Encode], None],
        report: Callable[[Encode], None] = lambda _encode: None,
    ) -> None:
        super().submit(batch, then, report)
        self.num_submitted += 1


@dataclass(frozen=True, slots=True)
class ExecutorServer:
    """A server that runs. `info` has its address."""

    info: ExecutorInfo
    servicer: ExecutorServicer
    worker: CountingWorker
    running: RunningServer


async def start_executor(
    info: ExecutorInfo,
    runner: Runner,
    listen: str = "127.0.0.1:0",
    tokenizer_files: Mapping[str, Path] | None = None,
    security: ServerSecurity = OPEN,
    adapters: AdapterLoading | None = None,
) -> ExecutorServer:
    """Serves `runner` on `listen`, under the epoch and with the limits of `info`."""
    running = bind_server(listen, (SERVICE,), info.limits.max_message_bytes, security=security)
    info = replace(info, address=f"127.0.0.1:{running.port}")
    servicer = ExecutorServicer()
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, running.server)
    worker = CountingWorker(StepExecutor(info, runner))
    servicer.serve(
        ReadyExecutor(
            worker, lambda: worker.describe(info), tokenizer_files or {}, adapters=adapters
        )
    )
    await running.server.start()
    return ExecutorServer(info, servicer, worker, running)


@asynccontextmanager
async def serve_executor(info: ExecutorInfo, runner: Runner) -> AsyncIterator[ExecutorServer]:
    """An executor on a free port, drained at the end."""
    server = await start_executor(info, runner)
    try:
        yield server
    finally:
        await server.servicer.drain()
        await server.running.server.stop(grace=1.0)


_epochs = itertools.count(time.time_ns())
_MAX_ADAPTERS_PER_STEP = 4


@dataclass(slots=True)
class FakeAdapters:
    """Adapters in the memory of a fake executor: the contents of their files.

    Weights that begin with b"bad" cannot be loaded. `loads`: names, in order.
    """

    num_slots: int
    by_name: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        return name in self.by_name

    def keep(self, names: Collection[str]) -> None:
        for name in set(self.by_name) - set(names):
            del self.by_name[name]

    def check_room(self, num_bytes: int) -> None:
        assert len(self.by_name) < self.num_slots, f"no slot for {num_bytes} bytes"

    def load(self, name: str, files: Mapping[str, bytes]) -> None:
        if files["adapter_model.safetensors"].startswith(b"bad"):
            raise AdapterInvalid("adapter_model.safetensors: lora_A has NaN")
        self.by_name[name] = files
        self.loads.append(name)


@dataclass(slots=True)
class _Life:
    """State of one executor process."""

    runner: FakeRunner | VectorRunner
    server: ExecutorServer
    registry: GrpcRegistry
    registering: asyncio.Task[None]


@dataclass(slots=True)
class FakeExecutor:
    """See the top of this file. Without `scheduler_address` it does not register.

    `registration_pause_s`: between two attempts, instead of a second. `us_per_block`,
    `us_per_token`: see FakeRunner. `adapters`: those that it loads for its scheduler; None if it
    has its own, or none. `vectors`: what it returns, by a VectorRunner; None for tokens.
    """

    scheduler_address: str | None = None
    block_size: int = 4
    num_device_blocks: int = 64
    num_host_blocks: int = 0
    vocab_size: int = 128
    max_model_len: int = 256
    eos_token_ids: tuple[int, ...] = ()
    model_name: str = "fake"
    digest: str = "fa4e"
    limits: ExecutorLimits = field(default_factory=ExecutorLimits)
    features: frozenset[Feature] = SAMPLING_FEATURES
    sliding_window_tokens: int | None = None
    us_per_block: int = 0
    us_per_token: int = 0
    tokenizer_files: Mapping[str, Path] = field(default_factory=dict)
    default_sampling: DefaultSampling = field(default_factory=DefaultSampling)
    fault: Callable[[StepInput], StepFault] = no_fault
    registration_pause_s: float = 0.02
    num_steps: int = 0
    adapters: FakeAdapters | None = None
    vectors: ModelVectors | None = None
    violations: list[str] = field(default_factory=list)
    _life: _Life | None = None
    _listen: str = field(default_factory=reserve_address)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        if self._life is not None:
            await self._end(grace_s=1.0, drain=True)

    @property
    def info(self) -> ExecutorInfo:
        """Registration of the current process."""
        return self._present.server.info

    @property
    def runner(self) -> FakeRunner:
        """The runner of the present life, which samples tokens."""
        runner = self._present.runner
        assert isinstance(runner, FakeRunner), "it returns vectors"
        return runner

    @property
    def address(self) -> str:
        """`host:port`; the same in every life."""
        return self.info.address

    async def start(self) -> None:
        """Begins a life: a new epoch, empty pools, the same address as before."""
        registry = GrpcRegistry(self.scheduler_address or "")
        adapters = self.adapters
        if adapters is not None:
            adapters.by_name.clear()
        runner = self._new_runner()
        server = await start_executor(
            self._new_info(),
            _Counted(self, runner),
            self._listen,
            self.tokenizer_files,
            adapters=None if adapters is None else AdapterLoading(adapters, registry.fetch_adapter),
        )
        registering = asyncio.create_task(self._register(server, registry))
        self._life = _Life(runner, server, registry, registering)

    def _new_runner(self) -> FakeRunner | VectorRunner:
        if self.vectors is not None:
            num_blocks = 0 if self.vectors.is_uncached else self.num_device_blocks
            return VectorRunner(self.block_size, num_blocks, self.fault)
        runner = FakeRunner(
            block_size=self.block_size,
            num_device_blocks=self.num_device_blocks,
            num_host_blocks=self.num_host_blocks,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            fault=self.fault,
            sliding_window_tokens=self.sliding_window_tokens,
            us_per_block=self.us_per_block,
            us_per_token=self.us_per_token,
        )
        runner.violations = self.violations
        return runner

    async def kill(self) -> None:
        """Ends the life at once: open streams break, nothing is finished or said."""
        await self._end(grace_s=None, drain=False)

    def cut(self) -> None:
        """Breaks the open streams, and lives on; results that are not sent yet are lost."""
        error = DomainError("STREAM_SUPERSEDED", "the test cuts the stream")
        self._present.server.servicer.streams.fail_all(error)

    async def leave(self, timeout_s: float) -> None:
        """Ends the life as SIGTERM does; running requests have `timeout_s` to end."""
        life = self._present
        await self._stop_registering(life)
        departures = Departures(lambda _: life.registry, life.server.servicer, timeout_s)
        await departures.leave(self.scheduler_address or "", self.info)
        await self.stop()

    async def stop(self) -> None:
        """Ends the life without a word; what was received is finished first."""
        await self._end(grace_s=1.0, drain=True)

    @property
    def _present(self) -> _Life:
        assert self._life is not None, "the executor is dead"
        return self._life

    async def _end(self, *, grace_s: float | None, drain: bool) -> None:
        life, self._life = self._present, None
        await self._stop_registering(life)
        if drain:
            await life.server.servicer.drain()
        await life.server.running.server.stop(grace_s)
        if not drain:
            await life.server.servicer.drain()

    async def _stop_registering(self, life: _Life) -> None:
        life.registering.cancel()
        with suppress(asyncio.CancelledError):
            await life.registering

    async def _register(self, server: ExecutorServer, registry: GrpcRegistry) -> None:
        if self.scheduler_address is None:
            return

        async def describe() -> ExecutorInfo:
            return server.info

        registrar = Registrar(
            registry,
            describe,
            server.servicer.streams.wait_none_open,
            server.worker.adopt_scheduler_epoch,
            Pacing(sleep=lambda _delay_s: asyncio.sleep(self.registration_pause_s)),
        )
        await registrar.run()

    def _new_info(self) -> ExecutorInfo:
        model = ModelInfo(
            name=self.model_name,
            digest=self.digest,
            dtype="float32",
            kv_cache_dtype="float32",
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            sliding_window=self.sliding_window_tokens,
            default_sampling=self.default_sampling,
            vectors=self.vectors,
        )
        limits, features, support = self.limits, self.features, None
        if self.vectors is not None:
            features |= {Feature.POOLING}
        if self.adapters is not None:
            num_slots = self.adapters.num_slots
            features |= {Feature.ADAPTERS}
            limits = replace(limits, max_adapters_per_step=num_slots)
            support = AdapterSupport(max_num_loaded=num_slots, max_rank=8)
        if Feature.ADAPTERS in self.features and limits.max_adapters_per_step is None:
            limits = replace(limits, max_adapters_per_step=_MAX_ADAPTERS_PER_STEP)
        return ExecutorInfo(
            executor_epoch=next(_epochs),
            model=model,
            block_size=self.block_size,
            num_device_blocks=self.num_device_blocks,
            num_host_blocks=self.num_host_blocks,
            block_bytes=16 * self.block_size,
            limits=limits,
            features=features,
            software_version="fake",
            adapter_support=support,
        )


@dataclass(frozen=True, slots=True)
class _Counted:
    """Counts the steps of all lives."""

    executor: FakeExecutor
    runner: FakeRunner | VectorRunner

    def begin(self, step: StepInput) -> FinishedStep:
        self.executor.num_steps += 1
        return self.runner.begin(step)
