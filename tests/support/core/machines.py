"""Executors of which a test says when they answer, without sockets or threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from executor_service.service.decode_batch import decode_batch
from executor_service.service.encode_answer import encode_answer, encode_info
from executor_service.steps.step import RowStatus, StepInput
from executor_service.steps.step_executor import StepExecutor
from scheduler_service.executors.executor_link import ExecutorLost
from scheduler_service.step_codec import EncodedBatch
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import make_config
from tests.support.core.in_process import executor_info
from tests.support.fakes.fake_runner import FakeRunner, StepFault

VOCAB_SIZE = 97
CONFIG = make_config(
    vocab_size=VOCAB_SIZE, eos_token_ids=frozenset(), max_num_seqs=4, num_device_blocks=24
)


class Machine:
    """An executor at an address, life after life. `link`: the scheduler's latest way to it."""

    def __init__(
        self,
        address: str,
        guilty: int | None = None,
        *,
        guilty_rows: int | None = None,
        **changes: object,
    ) -> None:
        """`guilty`: steps with a request whose number is a multiple of it fail.

        `guilty_rows`: so do rows alone. `changes`: what its configuration has other than others.
        """
        self.config = replace(CONFIG, **changes)  # type: ignore[arg-type]
        self.address = address
        self._guilty, self._guilty_rows = guilty, guilty_rows
        # What becomes of every step, or of every so many: an error, rows whose logits are no
        # numbers, or tokens that no vocabulary has.
        self.fails = self.is_not_a_number = self.says_no_tokens = False
        self.sick_every = 1
        self._num_steps = 0
        self.epoch = 0
        self.link: BurstLink | None = None
        # Whether a scheduler sent it away, as it remembers; whether it is about to end.
        self.says_drained = False
        self.says_draining = False
        # None: as many as executors take.
        self.max_inflight_steps: int | None = None
        # The step that it has measured.
        self.trial_step: pb.TrialStep | None = None
        self.restart()

    def restart(self) -> None:
        """A new life with empty pools."""
        self.epoch += 1
        self.runner = FakeRunner(
            block_size=self.config.block_size,
            num_device_blocks=self.config.num_device_blocks,
            num_host_blocks=self.config.num_host_blocks,
            vocab_size=VOCAB_SIZE,
            fault=self._fault,
        )
        self.executor = StepExecutor(executor_info(self.config, self.epoch), self.runner)

    def _fault(self, step: StepInput) -> StepFault:
        seeds = step.seeds.tolist()
        if self._guilty is not None and any(seed and seed % self._guilty == 0 for seed in seeds):
            return StepFault(error=RuntimeError("a request that nobody survives"))
        if self._guilty_rows is not None:
            is_bad = (step.seeds % self._guilty_rows == 0) & (step.seeds > 0) & step.samples
            if is_bad.any():
                row_ids = step.row_ids[is_bad].tolist()
                return StepFault(rows=dict.fromkeys(row_ids, RowStatus.INVALID_LOGITS))
        self._num_steps += 1
        if self._num_steps % self.sick_every:
            return StepFault()
        if self.fails:
            return StepFault(error=RuntimeError("the device is broken"))
        if self.is_not_a_number:
            row_ids = step.row_ids[step.samples].tolist()
            return StepFault(rows=dict.fromkeys(row_ids, RowStatus.INVALID_LOGITS))
        return StepFault()

    def compute(self, batch: EncodedBatch) -> pb.StepResult:
        """Executes a batch at once."""
        result = encode_answer(
            self.executor.execute(decode_batch(pb.ScheduleBatch.FromString(batch.data)))
        )
        if self.says_no_tokens:
            result.sampled_token_ids = (len(result.sampled_token_ids) // 4) * b"\xff\xff\xff\x7f"
        return result

    @property
    def info(self) -> pb.ExecutorInfo:
        """What it says of itself."""
        info = encode_info(executor_info(self.config, self.epoch))
        info.address, info.model.digest = self.address, "d" * 64
        if self.max_inflight_steps is not None:
            info.limits.max_inflight_steps = self.max_inflight_steps
        if self.trial_step is not None:
            info.trial_step.CopyFrom(self.trial_step)
        return info


class BurstLink:
    """Stands for an ExecutorLink. Batches are executed at once, results come when `release`d."""

    def __init__(self, machine: Machine, info: pb.ExecutorInfo) -> None:
        self.info = info
        self.held: list[pb.StepResult] = []
        self._machine = machine
        self._arrived: asyncio.Queue[pb.StepResult | None] = asyncio.Queue()
        machine.link = self

    def send(self, batch: EncodedBatch) -> None:
        """See Link."""
        self.held.append(self._machine.compute(batch))

    def release(self, change: Callable[[pb.StepResult], None] | None = None) -> None:
        """The oldest result comes in."""
        if self.held:
            result = self.held.pop(0)
            if change is not None:
                change(result)
            self._arrived.put_nowait(result)

    @property
    def is_silent(self) -> bool:
        """Whether no result will ever come of what was sent."""
        return not self.held and self._arrived.empty()

    def break_off(self) -> None:
        """The executor counts as lost."""
        self._arrived.put_nowait(None)

    async def get_info(self, timeout_s: float) -> pb.ExecutorInfo:
        """See Link."""
        return self._machine.info

    async def introduce(self, timeout_s: float) -> tuple[pb.ExecutorInfo, bool]:
        """See Link."""
        return await self.get_info(timeout_s), self._machine.says_drained

    async def is_draining(self, timeout_s: float) -> bool:
        """See Link."""
        return self._machine.says_draining

    async def tokenizer_files(self) -> dict[str, bytes]:
        """See Link."""
        return {"tokenizer.json": b"{}"}

    async def results(self) -> AsyncGenerator[pb.StepResult, None]:
        """See Link."""
        while (result := await self._arrived.get()) is not None:
            yield result
        raise ExecutorLost("the test lets it go")

    async def close(self) -> None:
        """See Link."""
