"""What the contract tests talk to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc.aio

from executor_service.errors import OutOfMemory
from executor_service.steps import (
    SAMPLING_FEATURES,
    ExecutorInfo,
    ExecutorLimits,
    Feature,
    ModelInfo,
    PendingStep,
    RowStatus,
    Runner,
    StepInput,
)
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from tests.support.fakes.fake_executor import ExecutorServer
from tests.support.fakes.fake_runner import FakeRunner, SlowCompiler, StepFault, expected_tokens
from tests.support.steps.batches import NewRow, Sender, WorkRow, tokens_of

EXECUTOR_EPOCH = 1000
SCHEDULER_EPOCH = 50
BLOCK_SIZE = 4
NUM_DEVICE_BLOCKS = 32
NUM_HOST_BLOCKS = 8
MAX_NUM_ROWS = 8
MAX_NUM_BATCHED_TOKENS = 64
MAX_MESSAGE_BYTES = 256 * 1024
MAX_INFLIGHT_STEPS = 3
MAX_ADAPTERS_PER_STEP = 2
# Of the backends that have one; it does not end where blocks do.
SLIDING_WINDOW = 5

# Vocabulary of both backends. The last tokens are there to be fed, and make something go wrong.
VOCAB_SIZE = 160
NAN_TOKEN = VOCAB_SIZE - 1
BROKEN_TOKEN = VOCAB_SIZE - 2
OUT_OF_MEMORY_TOKEN = VOCAB_SIZE - 3

EOS_TOKEN_IDS = (2,)
PROMPT = [11, 7, 93, 40, 5, 62]


@dataclass(frozen=True, slots=True)
class Backend:
    """A runner, what it announces, and the truth about it: the greedy token after a sequence."""

    runner: Runner
    vocab_size: int
    next_token: Callable[..., int]
    features: frozenset[Feature] = SAMPLING_FEATURES
    sliding_window: int | None = None


@dataclass(slots=True)
class GatedRunner:
    """Counts steps, and can hold them up until the test says so."""

    runner: Runner
    num_steps: int = 0
    entered: threading.Event = field(default_factory=threading.Event)
    _gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._gate.set()

    def begin(self, step: StepInput) -> PendingStep | None:
        self.num_steps += 1
        self.entered.set()
        self._gate.wait()
        return self.runner.begin(step)

    def shut(self) -> None:
        """Holds up the steps that follow."""
        self.entered.clear()
        self._gate.clear()

    def open(self) -> None:
        self._gate.set()


@dataclass(slots=True)
class Session:
    """One Execute stream, spoken by hand."""

    call: Any

    async def send(self, batch: pb.ScheduleBatch) -> None:
        await self.call.write(batch)

    async def receive(self) -> pb.StepResult:
        result = await self.call.read()
        assert isinstance(result, pb.StepResult), "the stream has ended"
        return result

    async def execute(self, batch: pb.ScheduleBatch) -> pb.StepResult:
        await self.send(batch)
        return await self.receive()

    async def tokens(self, batch: pb.ScheduleBatch) -> list[int]:
        """Executes a step in which everything must go well."""
        return tokens_of(await self.execute(batch))

    async def end(self) -> grpc.aio.AioRpcError:
        """Waits for the error that ends the stream."""
        try:
            while (await self.call.read()) is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError(f"ended without an error, {await self.call.code()}")


@dataclass(slots=True)
class Served:
    """An executor, a stub to it, and a scheduler's side to speak from."""

    backend: Backend
    gate: GatedRunner
    server: ExecutorServer
    stub: executor_pb2_grpc.ExecutorServiceStub
    sender: Sender = field(default_factory=lambda: Sender(SCHEDULER_EPOCH, EXECUTOR_EPOCH))

    def open(self) -> Session:
        return Session(self.stub.Execute())

    def truth(
        self, tokens: Sequence[int], num_tokens: int = 1, **additions: str | Sequence[int]
    ) -> list[int]:
        """The greedy tokens after `tokens`; `additions`: adapter and encoder."""
        sequence = list(tokens)
        for _ in range(num_tokens):
            sequence.append(self.backend.next_token(sequence, **additions))
        return sequence[len(tokens) :]

    def prompt_batch(
        self, step_id: int = 1, row_id: int = 0, blocks: Sequence[int] = (0, 1, 2)
    ) -> pb.ScheduleBatch:
        """A snapshot that computes PROMPT in one row and samples."""
        return self.sender.batch(
            step_id,
            new=[NewRow(row_id, blocks, num_prompt=len(PROMPT))],
            work=[WorkRow(row_id, 0, PROMPT)],
        )


def make_info(backend: Backend) -> ExecutorInfo:
    has_adapters = Feature.ADAPTERS in backend.features
    return ExecutorInfo(
        executor_epoch=EXECUTOR_EPOCH,
        model=ModelInfo(
            "tiny",
            "0f",
            "float32",
            "float32",
            backend.vocab_size,
            64,
            EOS_TOKEN_IDS,
            sliding_window=backend.sliding_window,
        ),
        block_size=BLOCK_SIZE,
        num_device_blocks=NUM_DEVICE_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        block_bytes=1024,
        limits=ExecutorLimits(
            MAX_NUM_ROWS,
            MAX_NUM_BATCHED_TOKENS,
            MAX_MESSAGE_BYTES,
            MAX_INFLIGHT_STEPS,
            MAX_ADAPTERS_PER_STEP if has_adapters else None,
        ),
        features=backend.features,
        software_version="test",
    )


def make_fake_backend(
    features: frozenset[Feature] = SAMPLING_FEATURES, sliding_window: int | None = None
) -> Backend:
    runner = FakeRunner(
        block_size=BLOCK_SIZE,
        num_device_blocks=NUM_DEVICE_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS_TOKEN_IDS,
        fault=_Faults(),
        sliding_window_tokens=sliding_window,
        us_per_block=20,
        us_per_token=1,
    )
    next_token = partial(_next_token, window=sliding_window)
    return Backend(runner, VOCAB_SIZE, next_token, features, sliding_window)


def _next_token(tokens: Sequence[int], window: int | None, **additions: Any) -> int:  # noqa: ANN401
    return expected_tokens(tokens, 1, 0, VOCAB_SIZE, window=window, **additions)[0]


class _Faults:
    """What the special tokens do; and each grammar takes the first row that asks for it a step."""

    def __init__(self) -> None:
        self._compiler = SlowCompiler(num_asks=1)

    def __call__(self, step: StepInput) -> StepFault:
        if OUT_OF_MEMORY_TOKEN in step.token_ids:
            return StepFault(error=OutOfMemory("no memory, says the test"))
        owners = step.row_ids.repeat(step.num_new_tokens).tolist()
        statuses = {NAN_TOKEN: RowStatus.INVALID_LOGITS, BROKEN_TOKEN: RowStatus.FAILED}
        each = zip(owners, step.token_ids.tolist(), strict=True)
        rows = {row: statuses[token] for row, token in each if token in statuses}
        return replace(self._compiler(step), rows=rows)
