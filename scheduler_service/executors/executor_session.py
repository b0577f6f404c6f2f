"""One executor over its link: steps go out, results come back as events of the scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeAlias

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepOutcome, StepPlan, StepStatus
from scheduler_service.executors.executor_link import ExecutorLost, ExecutorSilent, Link
from scheduler_service.executors.lives import Life
from scheduler_service.executors.step_alarm import StepAlarm
from scheduler_service.scheduler import events
from scheduler_service.step_codec import (
    EncodedBatch,
    Received,
    ResultUnusable,
    decode_result,
    encode_plan,
)
from splitserve.executor.v1 import executor_pb2 as executor

# Repetitions in a row of results that came before; nothing but these could go on for ever.
MAX_REPEATED = 1000

_log = logging.getLogger(__name__)


Report: TypeAlias = Callable[[events.Event, Received | None], None]


class ExecutorSession:
    """The conversation with one life of an executor.

    `report` takes the events. `steps` gives the executor up when it does not answer.
    `is_connected`: it serves. `closed` is to be called when the scheduler has removed it.
    """

    def __init__(
        self,
        link: Link,
        config: SchedulerConfig,
        life: Life,
        steps: StepAlarm,
        scheduler_epoch: int,
        report: Report,
    ) -> None:
        self.link = link
        self.info = link.info
        self.address: str = link.info.address
        self.config = config
        self.life = life
        self.steps = steps
        steps.give_up = self._lose
        self.scheduler_epoch = scheduler_epoch
        self._report = report
        self.is_connected = False
        self.task: asyncio.Task[None] | None = None
        self._in_flight: deque[tuple[int, int]] = deque()
        self._unsent_step_ids: set[int] = set()
        self._last_answered_step_id = 0
        self._num_repeated = 0
        self._lost: ExecutorLost | None = None
        self._ended = asyncio.Event()
        self._is_closed = False

    def send(self, plan: StepPlan) -> EncodedBatch:
        """Sends a step. One that is too large for a message is answered as refused in its turn."""
        batch = encode_plan(
            plan,
            scheduler_epoch=self.scheduler_epoch,
            executor_epoch=self.info.executor_epoch,
        )
        self._in_flight.append((plan.step_id, len(plan.work.row_ids)))
        if len(batch.data) <= self.info.limits.max_message_bytes:
            self.link.send(batch)
            self.steps.sent(plan)
        else:
            self._unsent_step_ids.add(plan.step_id)
            self._answer_unsent()
        return batch

    async def run(self) -> None:
        """Takes results until the executor is lost, or `closed`. Raises ExecutorLost."""
        receiving = asyncio.ensure_future(self._receive())
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if self._lost is not None:
                raise self._lost
            if not self._is_closed:
                receiving.result()
        finally:
            receiving.cancel()
            ending.cancel()
            await asyncio.gather(receiving, ending, return_exceptions=True)

    def closed(self) -> None:
        """The scheduler has removed the executor: ends `run`, and nothing is reported any more."""
        self._is_closed = True
        self.is_connected = False
        self.steps.stop()
        self._ended.set()

    def _lose(self, why: str) -> None:
        """Gives the executor up: `run` ends."""
        self._lost = ExecutorSilent(why)
        self._ended.set()

    async def _receive(self) -> None:
        async with aclosing(self.link.results()) as results:
            async for result in results:
                if self._is_closed:
                    return
                if not self._is_repeated(result.step_id):
                    self._take(result)
                    self._answer_unsent()

    def _is_repeated(self, step_id: int) -> bool:
        """Whether a result is of a step that was answered before: it says nothing new."""
        if not 1 <= step_id <= self._last_answered_step_id:
            self._num_repeated = 0
            return False
        self._num_repeated += 1
        if self._num_repeated > MAX_REPEATED:
            raise ExecutorLost(f"it broke the step contract: step {step_id} is answered for ever")
        _log.warning("step_answered_again address=%s step_id=%d", self.address, step_id)
        return True

    def _take(self, result: executor.StepResult) -> None:
        is_expected = bool(self._in_flight) and self._in_flight[0][0] == result.step_id
        num_rows = self._in_flight[0][1] if is_expected else 0
        try:
            outcome = decode_result(result, num_rows)
        except ResultUnusable as error:
            raise ExecutorLost(f"it broke the step contract: {error}") from error
        if outcome.status is not StepStatus.OK:
            _log.warning(
                "step_not_executed step_id=%d status=%s error=%r",
                outcome.step_id,
                outcome.status.value,
                outcome.error,
            )
        if is_expected:
            self._in_flight.popleft()
            self._last_answered_step_id = result.step_id
            self.steps.answered()
        self._report(events.StepCompleted(self.address, outcome), Received(result, num_rows))

    def _answer_unsent(self) -> None:
        """Answers batches that were too large to be sent, when it is their turn."""
        while self._in_flight and self._in_flight[0][0] in self._unsent_step_ids:
            step_id, _ = self._in_flight.popleft()
            self._unsent_step_ids.discard(step_id)
            _log.error("batch_exceeds_max_message_bytes step_id=%d", step_id)
            outcome = StepOutcome(step_id, StepStatus.REFUSED)
            self._report(events.StepCompleted(self.address, outcome, was_sent=False), None)
