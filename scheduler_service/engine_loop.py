"""The loop of one executor: schedule -> execute -> apply, with up to `pipeline_depth` in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from scheduler_service.codec import ResultUnusable, decode_result, encode_plan
from scheduler_service.core.plan import ContractBroken, StepEvents, StepOutcome, StepStatus
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.executor_link import ExecutorLink, ExecutorLost
from splitserve.executor.v1 import executor_pb2 as executor

_log = logging.getLogger(__name__)


class EngineLoop:
    """Drives one scheduler core and its executor."""

    def __init__(
        self,
        scheduler: Scheduler,
        link: ExecutorLink,
        deliver: Callable[[StepEvents], None],
        *,
        scheduler_epoch: int,
        pipeline_depth: int,
    ) -> None:
        self.scheduler = scheduler
        self.link = link
        self.is_connected = False
        self._deliver = deliver
        self._scheduler_epoch = scheduler_epoch
        self._credits = min(pipeline_depth, link.info.limits.max_inflight_steps)
        self._rows_of_step: dict[int, int] = {}
        self._unsent_step_ids: set[int] = set()
        self._wake_up_scheduled = False

    def wake_up(self) -> None:
        """Something was added: fills the pipeline once all that arrived together is in."""
        if not self._wake_up_scheduled:
            self._wake_up_scheduled = True
            asyncio.get_running_loop().call_soon(self._fill_pipeline)

    async def run(self) -> None:
        """Runs until the executor is lost. Raises ExecutorLost, with the reason."""
        self._fill_pipeline()
        async with aclosing(self.link.results()) as results:
            async for result in results:
                try:
                    events = self._apply(result)
                except (ResultUnusable, ContractBroken) as error:
                    raise ExecutorLost(f"it broke the step contract: {error}") from error
                self._answer_unsent()
                self._fill_pipeline()
                self._deliver(events)

    def _apply(self, result: executor.StepResult) -> StepEvents:
        outcome = decode_result(result, self._rows_of_step.pop(result.step_id, 0))
        if outcome.status is not StepStatus.OK:
            _log.warning(
                "step_not_executed step_id=%d status=%s error=%r",
                outcome.step_id,
                outcome.status.value,
                outcome.error,
            )
        return self.scheduler.apply(outcome)

    def _fill_pipeline(self) -> None:
        self._wake_up_scheduled = False
        while self.scheduler.num_in_flight < self._credits:
            plan = self.scheduler.schedule()
            if plan is None:
                return
            batch = encode_plan(
                plan,
                scheduler_epoch=self._scheduler_epoch,
                executor_epoch=self.link.info.executor_epoch,
            )
            if batch.ByteSize() <= self.link.info.limits.max_message_bytes:
                self._rows_of_step[plan.step_id] = len(plan.work.row_ids)
                self.link.send(batch)
            else:
                self._unsent_step_ids.add(plan.step_id)
                self._answer_unsent()

    def _answer_unsent(self) -> None:
        """Answers batches that were too large to be sent, when it is their turn."""
        while (step_id := self.scheduler.oldest_step_in_flight) in self._unsent_step_ids:
            assert step_id is not None
            self._unsent_step_ids.discard(step_id)
            _log.error("batch_exceeds_max_message_bytes step_id=%d", step_id)
            self._deliver(self.scheduler.apply(StepOutcome(step_id, StepStatus.REFUSED)))
