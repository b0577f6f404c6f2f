"""A core as an engine loop and a cluster see it, whether or not it is recorded."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from scheduler_service.core.plan import StepOutcome, StepPlan
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.journal.journaled_core import JournaledCore
from scheduler_service.step_codec import decode_result, encode_plan
from splitserve.executor.v1 import executor_pb2 as executor

Core: TypeAlias = Scheduler | JournaledCore


class StepCodec(Protocol):
    """The messages of one core's steps."""

    @property
    def position(self) -> str:
        """Where the latest event of the core is in the journal, for people."""

    def encode(self, plan: StepPlan) -> executor.ScheduleBatch:
        """The batch of the latest plan."""

    def decode(self, result: executor.StepResult, num_rows: int) -> StepOutcome:
        """The outcome of a step with `num_rows` rows, to be applied next. Raises ResultUnusable."""


class PlainCodec:
    """The messages of a core that is not recorded."""

    position = "no journal"

    def __init__(self, scheduler_epoch: int, executor_epoch: int) -> None:
        self._scheduler_epoch = scheduler_epoch
        self._executor_epoch = executor_epoch

    def encode(self, plan: StepPlan) -> executor.ScheduleBatch:
        """See StepCodec."""
        return encode_plan(
            plan, scheduler_epoch=self._scheduler_epoch, executor_epoch=self._executor_epoch
        )

    def decode(self, result: executor.StepResult, num_rows: int) -> StepOutcome:
        """See StepCodec."""
        return decode_result(result, num_rows)


def step_codec(core: Core, scheduler_epoch: int, executor_epoch: int) -> StepCodec:
    """What is to encode and decode the steps of `core`."""
    if isinstance(core, JournaledCore):
        return core
    return PlainCodec(scheduler_epoch, executor_epoch)
