"""The loop of one executor: schedule -> execute -> apply, with up to `pipeline_depth` in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import TypeVar

from scheduler_service.core.plan import (
    ContractBroken,
    StepEvents,
    StepOutcome,
    StepPlan,
    StepStatus,
)
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.executors.broken_core import CoreBroken, rescue
from scheduler_service.executors.executor_link import ExecutorLost, ExecutorSilent, Link
from scheduler_service.executors.step_alarm import StepAlarm
from scheduler_service.journal.core import Core, look_into, step_codec
from scheduler_service.new_rows_codec import encode_once
from scheduler_service.observer import Observer
from scheduler_service.step_codec import EncodedBatch, ResultUnusable
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_rpc.domain_error import DomainError

_Result = TypeVar("_Result")
# In a row, of steps that were answered before; nothing but these could go on for ever.
_MAX_REPEATED = 1000
_GIVEN_UP = "it was given up"

_log = logging.getLogger(__name__)


class EngineLoop:
    """Drives one scheduler core and its executor.

    `refill` is called before a step is planned: it may `readmit` requests that wait for this core,
    or for others. `evacuate` closes it: a callback, a result or a question that comes later,
    however it was under way, finds no core. `judge` sees each result before the core, and may take
    requests away. `is_connected`: it may be given requests, unless `is_draining` or `is_withdrawn`.
    `is_failing`: whatever it computes fails. `steps` gives it up when it does not answer.
    """

    def __init__(
        self,
        core: Core,
        link: Link,
        deliver: Callable[[StepEvents], None],
        refill: Callable[[EngineLoop], None],
        judge: Callable[[EngineLoop, StepOutcome], None],
        steps: StepAlarm,
        observer: Observer,
        *,
        scheduler_epoch: int,
        pipeline_depth: int,
        now_ns: Callable[[], int],
    ) -> None:
        self._open_core: Core | None = core
        self.link = link
        self.is_connected = False
        self.is_draining = False
        self.is_withdrawn = False
        self.is_failing = False
        self.steps = steps
        steps.give_up = self._lose
        self._deliver = deliver
        self._refill = refill
        self._judge = judge
        self._observer = observer
        self._codec = step_codec(core, scheduler_epoch, link.info.executor_epoch)
        self._now_ns = now_ns
        self._credits = min(pipeline_depth, link.info.limits.max_inflight_steps)
        self._rows_of_step: dict[int, int] = {}
        self._unsent_step_ids: set[int] = set()
        self._wake_up_scheduled = False
        self._alarm: asyncio.TimerHandle | None = None
        self._broken: CoreBroken | None = None
        self._lost: ExecutorLost | None = None
        self._ended = asyncio.Event()
        self._has_lost_events = False
        self._last_answered_step_id = 0
        self._num_repeated = 0

    @property
    def scheduler(self) -> Scheduler:
        """The core, to be looked at. Raises ExecutorLost once it was given up."""
        return look_into(self._core)

    @property
    def _core(self) -> Core:
        """The core, to be told things. Raises ExecutorLost once it was given up."""
        if self._open_core is None:
            raise ExecutorLost(_GIVEN_UP)
        return self._open_core

    @property
    def takes_requests(self) -> bool:
        """Returns whether the executor serves requests and answers in time."""
        return self.is_serving and not self.steps.watch.is_doubtful

    @property
    def is_serving(self) -> bool:
        """Whether it is connected, is to stay and is not withdrawn, and its core is sound."""
        is_sound = self._open_core is not None and self._broken is None and self._lost is None
        return self.is_connected and not self.is_draining and not self.is_withdrawn and is_sound

    @property
    def life(self) -> tuple[str, int]:
        """Of its executor: the address, and which of those that live there one after the other."""
        return self.link.info.address, self.link.info.executor_epoch

    @property
    def has_answered(self) -> bool:
        """Whether any step of this core was answered."""
        return self._last_answered_step_id > 0

    # -- what the cluster asks of it -----------------------------------------------------------

    def readmit(self, request: Request) -> None:
        """Takes a request that was accepted and checked. Raises ExecutorLost."""
        self._ask("readmit", lambda: self._core.readmit(request))
        if not request.is_finished:
            # Long ones take milliseconds, which a step of many would wait for.
            encode_once(request.params_set)

    def withdraw(self, request_id: str) -> Request | None:
        """Gives a request back that may as well wait elsewhere, or None. Raises ExecutorLost."""
        withdrawn: list[Request | None] = []
        self._ask("withdraw", lambda: withdrawn.append(self._core.withdraw(request_id)))
        return withdrawn[0]

    def abort(self, request_id: str) -> None:
        """Ends a request. Raises ExecutorLost."""
        self._ask("abort", lambda: self._core.abort(request_id))

    def _ask(self, name: str, question: Callable[[], object]) -> None:
        """Calls the core, and tells what has ended by it."""
        self._core.tick(self._now_ns())
        self.call(name, question)
        self._deliver_ended()
        self.wake_up()

    def wake_up(self) -> None:
        """Something was added: fills the pipeline once all that arrived together is in."""
        if not self._wake_up_scheduled:
            self._wake_up_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_steps)

    # -- its life ------------------------------------------------------------------------------

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
            if self._lost is not None:
                raise self._lost
            if self._open_core is None:
                raise ExecutorLost(_GIVEN_UP)
            receiving.result()
        finally:
            receiving.cancel()
            ending.cancel()
            await asyncio.gather(receiving, ending, return_exceptions=True)

    def evacuate(self) -> list[Request]:
        """Gives the core up; its requests, some with an error, as `rescue` says."""
        core, self._open_core = self._core, None
        if self._alarm is not None:
            self._alarm.cancel()
        self.steps.stop()
        self._ended.set()
        return rescue(core, self._broken, has_lost_events=self._has_lost_events)

    def _lose(self, why: str) -> None:
        """Gives the executor up: `run` ends."""
        self._lost = ExecutorSilent(why)
        self._ended.set()

    def call(self, name: str, call: Callable[[], _Result]) -> _Result:
        """Calls the core. Raises what a call may raise, else CoreBroken: then `run` ends, too.

        A core that is broken is not called again, and CoreBroken raised at once.
        """
        if self._broken is not None:
            raise self._broken
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
                if self._is_repeated(result.step_id):
                    continue
                events = self._take(result)
                try:
                    self._answer_unsent()
                    self._fill_pipeline()
                finally:
                    # Whatever fails by now, these tokens are known.
                    self._deliver(events)
                self._deliver_ended()

    def _deliver_ended(self) -> None:
        """Tells what has ended by decisions of the core; mostly nothing has."""
        events = self.call("take_ended", self._core.take_ended)
        if events.any_ended:
            self._deliver(events)

    def _is_repeated(self, step_id: int) -> bool:
        """Whether a result is of a step that was answered before: it says nothing new."""
        if not 1 <= step_id <= self._last_answered_step_id:
            self._num_repeated = 0
            return False
        self._num_repeated += 1
        if self._num_repeated > _MAX_REPEATED:
            raise ExecutorLost(f"it broke the step contract: step {step_id} is answered for ever")
        _log.warning("step_answered_again address=%s step_id=%d", self.link.info.address, step_id)
        return True

    def _start_steps(self) -> None:
        self._wake_up_scheduled = False
        if self._open_core is None or self._broken is not None:
            return
        with suppress(CoreBroken):  # `run` raises it
            self._fill_pipeline()
            self._deliver_ended()

    def _take(self, result: executor.StepResult) -> StepEvents:
        core = self._core
        core.tick(self._now_ns())
        try:
            outcome = self._codec.decode(result, self._rows_of_step.pop(result.step_id, 0))
            if outcome.status is not StepStatus.OK:
                _log.warning(
                    "step_not_executed step_id=%d status=%s error=%r",
                    outcome.step_id,
                    outcome.status.value,
                    outcome.error,
                )
            self._judge(self, outcome)
            events = self._apply(core, outcome)
            self.steps.answered()
            self._observer.step_answered(self.link.info.address, outcome)
            return events
        except (ResultUnusable, ContractBroken) as error:
            raise ExecutorLost(f"it broke the step contract: {error}") from error

    def _apply(self, core: Core, outcome: StepOutcome) -> StepEvents:
        try:
            events = self.call("apply", lambda: core.apply(outcome))
        except CoreBroken:  # a result that breaks the contract leaves nothing half taken
            was_taken = look_into(core).oldest_step_in_flight != outcome.step_id
            self._has_lost_events = was_taken and outcome.status is StepStatus.OK
            raise
        self._last_answered_step_id = outcome.step_id
        return events

    def _fill_pipeline(self) -> None:
        while self.scheduler.num_in_flight < self._credits:
            self._refill(self)
            begun_ns = self._now_ns()
            self._core.tick(begun_ns)
            planned = self.call("schedule", self._next_batch)
            if planned is None:
                if self.scheduler.num_in_flight == 0:
                    # Who was given before may have ended since, and kept others out: no result will
                    # come after which they are looked at again.
                    self._refill(self)
                self._plan_wake_up()
                return
            plan, batch = planned
            if len(batch.data) <= self.link.info.limits.max_message_bytes:
                self.link.send(batch)
                self.steps.sent(plan)
                planning_ns = self._now_ns() - begun_ns
                self._observer.step_sent(self.link.info.address, plan, planning_ns)
            else:
                self._unsent_step_ids.add(batch.step_id)
                self._answer_unsent()

    def _plan_wake_up(self) -> None:
        """Sees to it that the core is asked again when it wants to be."""
        at_ns = self.scheduler.ask_again_at_ns
        if self.scheduler.is_behind:
            self.wake_up()
        elif at_ns is not None and self.scheduler.num_in_flight == 0:
            if self._alarm is not None:
                self._alarm.cancel()
            delay_s = max(0, at_ns - self._now_ns()) / 1e9
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self.wake_up)

    def _next_batch(self) -> tuple[StepPlan, EncodedBatch] | None:
        plan = self._core.schedule()
        if plan is None:
            return None
        self._rows_of_step[plan.step_id] = len(plan.work.row_ids)
        return plan, self._codec.encode(plan)

    def _answer_unsent(self) -> None:
        """Answers batches that were too large to be sent, when it is their turn."""
        core = self._core
        while (step_id := look_into(core).oldest_step_in_flight) in self._unsent_step_ids:
            assert step_id is not None
            self._unsent_step_ids.discard(step_id)
            _log.error("batch_exceeds_max_message_bytes step_id=%d", step_id)
            self._rows_of_step.pop(step_id)
            self._deliver(self._apply(core, StepOutcome(step_id, StepStatus.REFUSED)))
