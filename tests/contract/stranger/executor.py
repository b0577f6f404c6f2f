"""An executor written from executor.proto alone: `StrangerExecutor`."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc as pb_grpc
from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from tests.contract.stranger.engine import Engine, Faults

SAMPLING_FEATURES = (
    pb.FEATURE_LOGPROBS,
    pb.FEATURE_PROMPT_LOGPROBS,
    pb.FEATURE_PENALTIES,
    pb.FEATURE_LOGIT_BIAS,
    pb.FEATURE_TOKEN_CONSTRAINTS,
)
ALL_SAMPLING = (*SAMPLING_FEATURES, pb.FEATURE_SEVERAL_TOKENS)


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """What the executor announces."""

    vocab_size: int = 1000
    block_size: int = 4
    num_device_blocks: int = 256
    num_host_blocks: int = 0
    max_num_rows: int = 16
    max_num_batched_tokens: int = 256
    max_inflight_steps: int = 4
    max_message_bytes: int = 65536
    max_model_len: int = 200
    eos_token_ids: tuple[int, ...] = ()
    features: tuple[pb.Feature, ...] = SAMPLING_FEATURES
    default_sampling_params: pb.SamplingParams | None = None
    digest: str = "ab" * 32
    contract_minor: int = 4
    sampling_version: int | None = None
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)
    register_interval_s: float = 0.5


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Ends a stream; OK is a plain end."""

    code: grpc.StatusCode
    message: str = ""


@dataclass(slots=True, eq=False)
class Stream:
    """One Execute stream. `is_cut` streams get no more answers."""

    outbox: asyncio.Queue[pb.StepResult | StreamEnd] = field(default_factory=asyncio.Queue)
    is_cut: bool = False

    def cut(self, code: grpc.StatusCode, message: str) -> None:
        """Ends the stream now; answers not yet sent are lost."""
        self.is_cut = True
        while not self.outbox.empty():
            self.outbox.get_nowait()
        self.outbox.put_nowait(StreamEnd(code, message))


async def _run_finalizers() -> None:
    """The finalizer of a grpc.aio server needs its loop; calls keep servers in cycles."""
    await asyncio.sleep(0)
    gc.collect()
    for _ in range(4):
        await asyncio.sleep(0)


class StrangerExecutor:
    """Serves ExecutorService, keeps registering, executes batches one by one."""

    def __init__(self, config: ExecutorConfig | None = None, faults: Faults | None = None) -> None:
        self.config = config or ExecutorConfig()
        self.tokenizer_files = self.config.tokenizer_files
        self.faults = faults or Faults()
        # While clear, received batches wait.
        self.gate = asyncio.Event()
        self.gate.set()
        self.batches: list[pb.ScheduleBatch] = []
        self.max_num_inflight = 0
        self._num_inflight = 0
        self._streams: list[Stream] = []
        self._live: Stream | None = None
        # Streams whose further batches never arrived.
        self._losing: set[Stream] = set()
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._restarts: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None
        self._scheduler_address = ""
        self._port = 0
        self.info = pb.ExecutorInfo()
        self.engine = Engine(self.info, self.faults)
        self._old_violations: list[str] = []

    # --- life ------------------------------------------------------------------------------

    async def start(self, scheduler_address: str = "") -> None:
        """Serves, and registers at `scheduler_address` if there is one."""
        self._scheduler_address = scheduler_address
        limit = self.config.max_message_bytes
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", limit)])
        servicer = StrangerServicer(self)
        pb_grpc.add_ExecutorServiceServicer_to_server(servicer, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self.info = self._describe()
        self.engine = Engine(self.info, self.faults)
        self._inbox: asyncio.Queue[tuple[Stream, pb.ScheduleBatch | None]] = asyncio.Queue()
        await self._server.start()
        self._tasks = [asyncio.create_task(self._work())]
        if scheduler_address:
            self._tasks.append(asyncio.create_task(self._keep_registered()))

    async def stop(self) -> None:
        """Goes away at once; the port stays reserved for `start`."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None
            await self.wait_until(lambda: not self._streams)
            await _run_finalizers()
        self._old_violations += self.engine.violations
        self.engine.violations.clear()

    async def close(self) -> None:
        """Stops for good, after a restart under way."""
        for restart in self._restarts:
            await restart
        await self.stop()

    async def restart(self) -> None:
        """Forgets everything and serves under a new epoch on the same port."""
        await self.stop()
        self._streams.clear()
        self._live = None
        self._num_inflight = 0
        await self.start(self._scheduler_address)

    def _describe(self) -> pb.ExecutorInfo:
        config = self.config
        return pb.ExecutorInfo(
            contract_version=pb.ContractVersion(major=1, minor=config.contract_minor),
            executor_epoch=time.time_ns(),
            address=f"127.0.0.1:{self._port}",
            model=pb.ModelInfo(
                name="stranger",
                digest=config.digest,
                dtype="float32",
                kv_cache_dtype="float32",
                vocab_size=config.vocab_size,
                max_model_len_tokens=config.max_model_len,
                eos_token_ids=config.eos_token_ids,
                default_sampling_params=config.default_sampling_params,
            ),
            block_size_tokens=config.block_size,
            num_device_blocks=config.num_device_blocks,
            num_host_blocks=config.num_host_blocks,
            block_bytes=config.block_size * 24,
            limits=pb.ExecutorLimits(
                max_num_rows=config.max_num_rows,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_message_bytes=config.max_message_bytes,
                max_inflight_steps=config.max_inflight_steps,
            ),
            features=config.features,
            software_version="stranger",
            sampling_version=config.sampling_version,
        )

    async def _keep_registered(self) -> None:
        """Registers about every second while no Execute stream is open."""
        async with grpc.aio.insecure_channel(self._scheduler_address) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            while True:
                if not self._streams:
                    request = registry_pb2.RegisterRequest(executor=self.info)
                    with suppress(grpc.aio.AioRpcError):
                        response = await stub.Register(request, timeout=60)
                        self.engine.adopt(response.scheduler_epoch)
                self._wake.clear()
                pause_s = self.config.register_interval_s * random.uniform(0.9, 1.1)
                # Not wait_for: it can swallow a cancellation.
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._wake.wait()

    # --- what the servicer calls -----------------------------------------------------------

    def open_stream(self) -> Stream:
        """A scheduler has opened a stream; its first batch decides whether it supersedes."""
        stream = Stream()
        self._streams.append(stream)
        self._notify()
        return stream

    def receive(self, stream: Stream, batch: pb.ScheduleBatch | None) -> None:
        """Queues a batch, or the end of the scheduler's messages."""
        if batch is not None:
            self.batches.append(batch)
            self._num_inflight += 1
            self.max_num_inflight = max(self.max_num_inflight, self._num_inflight)
        self._inbox.put_nowait((stream, batch))
        self._notify()

    def close_stream(self, stream: Stream) -> None:
        """Forgets a stream; batches received from it are still executed."""
        stream.is_cut = True
        if stream in self._streams:
            self._streams.remove(stream)
        self._wake.set()
        self._notify()

    def _supersede(self, stream: Stream) -> None:
        """A batch of `stream` was taken."""
        if self._live is stream or stream.is_cut:
            return
        if self._live in self._streams and self._live is not None:
            self._live.cut(grpc.StatusCode.ABORTED, "superseded by a newer stream")
        self._live = stream

    # --- the worker ------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            self._notify()
            stream, batch = await self._inbox.get()
            if batch is None:
                stream.outbox.put_nowait(StreamEnd(grpc.StatusCode.OK))
                continue
            await self.gate.wait()
            self._num_inflight -= 1
            if self._is_lost(stream, batch):
                continue
            result = self.engine.handle(batch)
            if result.status in (pb.STEP_STATUS_OK, pb.STEP_STATUS_FAILED):
                self._supersede(stream)
            if self._is_due("cut_at", batch):
                stream.cut(grpc.StatusCode.UNAVAILABLE, "cut after executing")
            if not stream.is_cut:
                stream.outbox.put_nowait(result)

    def _is_lost(self, stream: Stream, batch: pb.ScheduleBatch) -> bool:
        """Whether a fault swallows this batch as if it had never arrived."""
        if stream in self._losing:
            return True
        if self._is_due("lose_at", batch):
            self._losing.add(stream)
            stream.cut(grpc.StatusCode.UNAVAILABLE, "cut before receiving")
            return True
        if self._is_due("restart_at", batch):
            self._losing.add(stream)
            self._restarts.append(asyncio.create_task(self.restart()))
            return True
        return False

    def _is_due(self, fault: str, batch: pb.ScheduleBatch) -> bool:
        at = getattr(self.faults, fault)
        if at is None or batch.step_id < at:
            return False
        setattr(self.faults, fault, None)
        return True

    # --- for tests -------------------------------------------------------------------------

    @property
    def violations(self) -> list[str]:
        """What a correct scheduler never causes, over all lives."""
        return self._old_violations + self.engine.violations

    @property
    def num_streams(self) -> int:
        """Open Execute streams."""
        return len(self._streams)

    async def wait_until(self, is_true: Callable[[], bool], timeout_s: float = 240) -> None:
        """Waits for something that batches bring about. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not is_true():
                await self._changed.wait()

    async def wait_for_stream(self) -> None:
        """Waits until a scheduler has opened an Execute stream. Raises TimeoutError."""
        await self.wait_until(lambda: self.num_streams > 0)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class StrangerServicer(pb_grpc.ExecutorServiceServicer):
    """Carries messages between streams and the executor."""

    def __init__(self, executor: StrangerExecutor) -> None:
        self._executor = executor

    async def GetInfo(  # noqa: N802
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetInfoResponse:
        """Says what this executor is."""
        return pb.GetInfoResponse(executor=self._executor.info)

    async def GetTokenizer(  # noqa: N802
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """Streams dummy files in small chunks, or ends with NOT_FOUND."""
        if not self._executor.tokenizer_files:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this executor has no tokenizer")
        for name, data in self._executor.tokenizer_files.items():
            for start in range(0, len(data), 5):
                yield pb.GetTokenizerResponse(file_name=name, data=data[start : start + 5])

    async def Execute(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.ScheduleBatch],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[pb.StepResult]:
        """Answers batches in the order received."""
        stream = self._executor.open_stream()
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while True:
                answer = await stream.outbox.get()
                if isinstance(answer, StreamEnd):
                    if answer.code is not grpc.StatusCode.OK:
                        await context.abort(answer.code, answer.message)
                    return
                yield answer
        finally:
            self._executor.close_stream(stream)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, batches: AsyncIterator[pb.ScheduleBatch], stream: Stream) -> None:
        async for batch in batches:
            self._executor.receive(stream, batch)
        self._executor.receive(stream, None)
