"""The loop of one executor: schedule -> execute -> apply, with up to `pipeline_depth` in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import TypeVar

from scheduler_service.broken_core import CoreBroken, rescue
from scheduler_service.core.plan import ContractBroken, StepEvents, StepOutcome, StepStatus
from scheduler_service.core.request import Request
from scheduler_service.executor_link import ExecutorLink, ExecutorLost
from scheduler_service.journal.core import Core, step_codec
from scheduler_service.step_codec import ResultUnusable
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_rpc.domain_error import DomainError

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class EngineLoop:
    """Drives one scheduler core and its executor."""

    def __init__(
        self,
        scheduler: Core,
        link: ExecutorLink,
        deliver: Callable[[StepEvents], None],
        *,
        scheduler_epoch: int,
        pipeline_depth: int,
        now_ns: Callable[[], int],
    ) -> None:
        self.scheduler = scheduler
        self.link = link
        self.is_connected = False
        self._deliver = deliver
        self._codec = step_codec(scheduler, scheduler_epoch, link.info.executor_epoch)
        self._now_ns = now_ns
        self._credits = min(pipeline_depth, link.info.limits.max_inflight_steps)
        self._rows_of_step: dict[int, int] = {}
        self._unsent_step_ids: set[int] = set()
        self._wake_up_scheduled = False
        self._broken: CoreBroken | None = None
        self._ended = asyncio.Event()
        self._has_lost_events = False

    def wake_up(self) -> None:
        """Something was added: fills the pipeline once all that arrived together is in."""
        if not self._wake_up_scheduled:
            self._wake_up_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_steps)

    async def run(self) -> None:
        """Runs until the executor is lost. Raises ExecutorLost, with the reason.

        It is CoreBroken if the core failed; either way, `evacuate` comes next.
        """
        self._start_steps()
        receiving = asyncio.ensure_future(self._receive())
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if self._broken is not None:
                raise self._broken
            receiving.result()
        finally:
            receiving.cancel()
            ending.cancel()
            await asyncio.gather(receiving, ending, return_exceptions=True)

    def evacuate(self) -> list[Request]:
        """Gives the core up, after `run`; its requests, some with an error, as `rescue` says."""
        return rescue(self.scheduler, self._broken, has_lost_events=self._has_lost_events)

    def call(self, name: str, call: Callable[[], _Result]) -> _Result:
        """Calls the core. Raises what a call may raise, else CoreBroken: then `run` ends, too."""
        try:
            return call()
        except (DomainError, ContractBroken):
            raise
        except Exception as error:
            _log.exception(
                "core_invariant_broken address=%s call=%s journal=%s",
                self.link.info.address,
                name,
                self._codec.position,
            )
            self._broken = CoreBroken(name, error)
            self._ended.set()
            raise self._broken from error

    async def _receive(self) -> None:
        async with aclosing(self.link.results()) as results:
            async for result in results:
                events = self._take(result)
                try:
                    self._answer_unsent()
                    self._fill_pipeline()
                finally:
                    # Whatever fails by now, these tokens are known.
                    self._deliver(events)
                self._deliver(self.call("take_ended", self.scheduler.take_ended))

    def _start_steps(self) -> None:
        self._wake_up_scheduled = False
        if self._broken is not None:
            return
        with suppress(CoreBroken):  # `run` raises it
            self._fill_pipeline()
            self._deliver(self.call("take_ended", self.scheduler.take_ended))

    def _take(self, result: executor.StepResult) -> StepEvents:
        try:
            outcome = self._codec.decode(result, self._rows_of_step.pop(result.step_id, 0))
            if outcome.status is not StepStatus.OK:
                _log.warning(
                    "step_not_executed step_id=%d status=%s error=%r",
                    outcome.step_id,
                    outcome.status.value,
                    outcome.error,
                )
            return self._apply(outcome)
        except (ResultUnusable, ContractBroken) as error:
            raise ExecutorLost(f"it broke the step contract: {error}") from error

    def _apply(self, outcome: StepOutcome) -> StepEvents:
        try:
            return self.call("apply", lambda: self.scheduler.apply(outcome))
        except CoreBroken:  # a result that breaks the contract leaves nothing half taken
            was_taken = self.scheduler.oldest_step_in_flight != outcome.step_id
            self._has_lost_events = was_taken and outcome.status is StepStatus.OK
            raise

    def _fill_pipeline(self) -> None:
        while self.scheduler.num_in_flight < self._credits:
            self.scheduler.tick(self._now_ns())
            batch = self.call("schedule", self._next_batch)
            if batch is None:
                if self.scheduler.is_behind:
                    self.wake_up()
                return
            if batch.ByteSize() <= self.link.info.limits.max_message_bytes:
                self.link.send(batch)
            else:
                self._unsent_step_ids.add(batch.step_id)
                self._answer_unsent()

    def _next_batch(self) -> executor.ScheduleBatch | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self._rows_of_step[plan.step_id] = len(plan.work.row_ids)
        return self._codec.encode(plan)

    def _answer_unsent(self) -> None:
        """Answers batches that were too large to be sent, when it is their turn."""
        while (step_id := self.scheduler.oldest_step_in_flight) in self._unsent_step_ids:
            assert step_id is not None
            self._unsent_step_ids.discard(step_id)
            _log.error("batch_exceeds_max_message_bytes step_id=%d", step_id)
            self._rows_of_step.pop(step_id)
            self._deliver(self._apply(StepOutcome(step_id, StepStatus.REFUSED)))
