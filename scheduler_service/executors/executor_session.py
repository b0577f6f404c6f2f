"""Session with one executor: sends steps, reports results as events, and times out late steps.

`Lives` remembers lives of executors that may come back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

from scheduler_service.executors.adapter_loader import AdapterLoader, AdapterSources
from scheduler_service.executors.answer_watch import (
    AnswerWatch,
    LivenessVerdict,
    MeasuredStep,
    StepPatience,
    StepSize,
)
from scheduler_service.executors.executor_link import ExecutorLost, ExecutorSilent, Link
from scheduler_service.scheduler import events
from scheduler_service.scheduler.values import SchedulerConfig, StepOutcome, StepPlan, StepStatus
from scheduler_service.step_codec import (
    EncodedBatch,
    ReceivedResult,
    ResultUnusable,
    decode_part,
    decode_result,
    encode_plan,
    is_part,
)
from splitserve.executor.v1 import executor_pb2 as executor

# Limit of repeated results in a row; otherwise an executor could repeat results for ever.
MAX_REPEATED = 1000

_log = logging.getLogger(__name__)


Report: TypeAlias = Callable[[events.Event, ReceivedResult | None], None]


class ExecutorSession:
    """Session with one life of an executor.

    `report` takes the events. `sources` has the files of adapters. `steps` gives the executor up
    when it does not answer its steps. `is_connected`: the executor serves. `closed` is to be called
    when the scheduler has removed the executor.
    """

    def __init__(
        self,
        link: Link,
        config: SchedulerConfig,
        life: Life,
        steps: StepAlarm,
        scheduler_epoch: int,
        report: Report,
        sources: AdapterSources,
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
        self.adapters = AdapterLoader(
            link, scheduler_epoch, sources, lambda event: report(event, None)
        )
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
        """Sends a step, and returns its batch.

        A batch that is too large for a message is not sent. Its step counts as refused, once all
        earlier steps are answered.
        """
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
        """Receives results until the executor is lost or removed. Raises ExecutorLost."""
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
        """Ends `run` after the scheduler has removed the executor; no more events are reported."""
        self._is_closed = True
        self.is_connected = False
        self.steps.stop()
        self.adapters.close()
        self._ended.set()

    def _lose(self, why: str) -> None:
        """Gives the executor up: `run` raises ExecutorSilent with `why`."""
        self._lost = ExecutorSilent(why)
        self._ended.set()

    async def _receive(self) -> None:
        async with aclosing(self.link.results()) as results:
            async for result in results:
                if self._is_closed:
                    return
                if self._is_repeated(result.step_id):
                    continue
                if is_part(result):
                    self._take_part(result)
                else:
                    self._take(result)
                    self._answer_unsent()

    def _is_repeated(self, step_id: int) -> bool:
        """Returns whether the step was answered before; such a result is ignored.

        Raises ExecutorLost after MAX_REPEATED repeated results in a row.
        """
        if not 1 <= step_id <= self._last_answered_step_id:
            self._num_repeated = 0
            return False
        self._num_repeated += 1
        if self._num_repeated > MAX_REPEATED:
            raise ExecutorLost(
                f"broke the step contract: more than {MAX_REPEATED} repeated results in a row"
            )
        _log.warning("step_answered_again address=%s step_id=%d", self.address, step_id)
        return True

    def _take_part(self, result: executor.StepResult) -> None:
        """Reports a part of the result of the oldest step; the scheduler checks the step."""
        is_expected = bool(self._in_flight) and self._in_flight[0][0] == result.step_id
        num_rows = self._in_flight[0][1] if is_expected else 0
        try:
            part = decode_part(result, num_rows)
        except ResultUnusable as error:
            raise ExecutorLost(f"broke the step contract: {error}") from error
        if is_expected:
            self.steps.progressed()
        self._report(events.StepProgressed(self.address, part), ReceivedResult(result, num_rows))

    def _take(self, result: executor.StepResult) -> None:
        is_expected = bool(self._in_flight) and self._in_flight[0][0] == result.step_id
        num_rows = self._in_flight[0][1] if is_expected else 0
        try:
            outcome = decode_result(result, num_rows)
        except ResultUnusable as error:
            raise ExecutorLost(f"broke the step contract: {error}") from error
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
        self._report(events.StepCompleted(self.address, outcome), ReceivedResult(result, num_rows))

    def _answer_unsent(self) -> None:
        """Reports unsent steps as refused, as far as all earlier steps are answered."""
        while self._in_flight and self._in_flight[0][0] in self._unsent_step_ids:
            step_id, _ = self._in_flight.popleft()
            self._unsent_step_ids.discard(step_id)
            _log.error("batch_exceeds_max_message_bytes step_id=%d", step_id)
            outcome = StepOutcome(step_id, StepStatus.REFUSED)
            self._report(events.StepCompleted(self.address, outcome, was_sent=False), None)


# -- Timer of an `AnswerWatch` ---------------------------------------------------------------------


class StepAlarm:
    """Timer of the `AnswerWatch` of one executor: looks when it is time, and acts on the verdict.

    `ask_others` starts to ask the other executors for signs of life. `doubted` is called with
    whether the executor is doubtful, at each change. `give_up` is set by the session, and is called
    with the reason.
    """

    def __init__(
        self,
        watch: AnswerWatch,
        now_ns: Callable[[], int],
        *,
        block_size: int,
        ask_others: Callable[[], None],
        doubted: Callable[[bool], None],
    ) -> None:
        self._watch = watch
        self._now_ns = now_ns
        self._block_size = block_size
        self._ask_others = ask_others
        self._doubted = doubted
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at_ns = 0
        self.give_up: Callable[[str], None] = lambda _why: None

    @property
    def watch(self) -> AnswerWatch:
        """Unanswered steps of the executor."""
        return self._watch

    def sent(self, plan: StepPlan) -> None:
        """Notes that a step was sent."""
        self._watch.sent(StepSize.of(plan, self._block_size), self._now_ns())
        self._set_timer()

    def progressed(self) -> None:
        """Notes that the oldest step got tokens: its time starts anew."""
        was_doubtful = self._watch.is_doubtful
        self._watch.progressed(self._now_ns())
        self._notice(was_doubtful=was_doubtful)

    def answered(self) -> None:
        """Notes that the oldest step was answered."""
        was_doubtful = self._watch.is_doubtful
        self._watch.answered(self._now_ns())
        self._set_timer()
        self._notice(was_doubtful=was_doubtful)

    def connected(self, *, is_cut: bool) -> None:
        """Notes that the connection to the executor is broken, or back."""
        was_doubtful = self._watch.is_doubtful
        if is_cut:
            self._watch.cut()
        else:
            self._watch.mended(self._now_ns())
            self._set_timer()
        self._notice(was_doubtful=was_doubtful)

    def silent(self, *, is_silent: bool) -> None:
        """Notes whether the executor is silent: does not answer GetInfo."""
        was_doubtful = self._watch.is_doubtful
        self._watch.is_silent = is_silent
        self._notice(was_doubtful=was_doubtful)

    def stop(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _notice(self, *, was_doubtful: bool) -> None:
        """Reports whether the executor is doubtful, if that has changed."""
        if was_doubtful != self._watch.is_doubtful:
            self._doubted(not was_doubtful)

    def _set_timer(self) -> None:
        """Sets the timer for the next look.

        One timer serves many steps: it is set again only if it would fire too late.
        """
        if self._timer is not None and self._looks_at_ns <= self._watch.earliest_look_ns:
            return
        at_ns = self._watch.look_at_ns
        if at_ns is None or (self._timer is not None and self._looks_at_ns <= at_ns):
            return
        self.stop()
        self._looks_at_ns = at_ns
        delay_s = max(0, at_ns - self._now_ns()) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_ns = self._now_ns()
        was_doubtful = self._watch.is_doubtful
        verdict = self._watch.look(now_ns)
        self._notice(was_doubtful=was_doubtful)
        match verdict:
            case LivenessVerdict.GIVE_UP:
                waited_s, allowed_s = self._watch.waited_s(now_ns), self._watch.allowed_s
                self.give_up(
                    f"no result of the oldest step after {waited_s:.3g} s; "
                    f"allowed: {allowed_s:.3g} s"
                )
                return
            case LivenessVerdict.ASK:
                self._ask_others()
            case LivenessVerdict.WAIT:
                pass
        self._set_timer()


# -- Lives of executors that may come back ---------------------------------------------------------

_MAX_REMEMBERED = 4096


@dataclass(slots=True)
class Life:
    """Process life of an executor: epoch, latest step and time limits of steps."""

    executor_epoch: int
    patience: StepPatience
    last_step_id: int = 0


class Lives:
    """Latest life at each address, for the 4096 addresses that were kept most recently."""

    def __init__(self, step_patience_s: float, step_timeout_s: float) -> None:
        self._patience_s = (step_patience_s, step_timeout_s)
        self._lives: OrderedDict[str, Life] = OrderedDict()

    def of(self, address: str, executor_epoch: int, measured: MeasuredStep | None = None) -> Life:
        """Returns the remembered life with this epoch, or a new one, which is not remembered yet.

        `measured`: step that the executor measured itself, for a new life. The caller passes a
        verified life to `keep`.
        """
        life = self._lives.get(address)
        if life is not None and life.executor_epoch == executor_epoch:
            return life
        return Life(executor_epoch, StepPatience(*self._patience_s, measured))

    def keep(self, address: str, life: Life) -> None:
        """Remembers `life` as the latest at `address`."""
        self._lives[address] = life
        self._lives.move_to_end(address)
        while len(self._lives) > _MAX_REMEMBERED:
            self._lives.popitem(last=False)
