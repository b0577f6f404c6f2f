"""A core that tells a journal whatever happens to it."""

from __future__ import annotations

from scheduler_service.core.plan import StepEvents, StepOutcome, StepPlan, StepStatus
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.journal.call_log import CallLog, Recorder
from scheduler_service.journal.checkpoint import core_structure, dump_core
from scheduler_service.journal.decisions import (
    describe_evacuated,
    describe_events,
    describe_given_away,
)
from scheduler_service.journal.request_codec import encode_request
from scheduler_service.step_codec import EncodedBatch, decode_result, encode_plan
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import journal_pb2 as journal

_Entry = journal.JournalEntry


class JournaledCore:
    """Takes the calls that a `Scheduler` takes, and is the codec of its steps.

    The entry of a call is written when it has returned or raised. `scheduler` is the core itself,
    for whoever looks at it; what would change it goes through here.
    """

    def __init__(
        self, core: Scheduler, number: int, identity: journal.CoreIdentity, recorder: Recorder
    ) -> None:
        self.scheduler = core
        self._number = number
        self._identity = identity
        self._recorder = recorder
        self._calls = CallLog(number, recorder)
        # The batch of the latest plan, and the latest result decoded, with its number of rows.
        self._planned: tuple[StepPlan, EncodedBatch] | None = None
        self._received: tuple[executor.StepResult, int] | None = None

    # -- recorded calls ------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Recorded with the next event."""
        self._calls.now_ns = now_ns
        self.scheduler.tick(now_ns)

    def add(self, request: Request) -> None:
        self._calls.record(
            lambda entry: entry.add.request.CopyFrom(encode_request(request)),
            lambda: self.scheduler.add(request),
            _nothing,
        )

    def readmit(self, request: Request) -> None:
        self._calls.record(
            lambda entry: entry.readmit.request.CopyFrom(encode_request(request)),
            lambda: self.scheduler.readmit(request),
            _nothing,
        )

    def abort(self, request_id: str) -> Request | None:

        def ask(entry: _Entry) -> None:
            entry.abort.request_id = request_id

        def answer(entry: _Entry, request: Request | None) -> None:
            entry.abort.found = request is not None

        return self._calls.record(ask, lambda: self.scheduler.abort(request_id), answer)

    def withdraw(self, request_id: str) -> Request | None:

        def ask(entry: _Entry) -> None:
            entry.withdraw.request_id = request_id

        def answer(entry: _Entry, request: Request | None) -> None:
            if request is not None:
                entry.withdraw.request.CopyFrom(describe_given_away(request))

        return self._calls.record(ask, lambda: self.scheduler.withdraw(request_id), answer)

    def evacuate(self) -> list[Request]:
        """The last that is recorded."""
        self._recorder.forget(self._number)
        try:
            return self._calls.record(
                lambda entry: entry.evacuate.SetInParent(),
                self.scheduler.evacuate,
                _answer_evacuate,
            )
        finally:
            self._calls.end()
            self._recorder.flush()

    def take_ended(self) -> StepEvents:
        events = self.scheduler.take_ended()
        if events.finished or events.finished_sequences:
            self._calls.record(
                lambda entry: entry.take_ended.SetInParent(), lambda: events, _answer_take_ended
            )
        return events

    def schedule(self) -> StepPlan | None:
        plan = self._calls.record(
            lambda entry: entry.schedule.SetInParent(), self._schedule, self._answer_schedule
        )
        if plan is None and not self.scheduler.num_in_flight:
            self._recorder.flush()
        return plan

    def apply(self, outcome: StepOutcome) -> StepEvents:
        """An `outcome` with tokens is the one that `decode` gave last."""
        received, self._received = self._received, None

        def ask(entry: _Entry) -> None:
            result, num_rows = received or (None, 0)
            if result is None or result.step_id != outcome.step_id:
                assert outcome.status is not StepStatus.OK, "an outcome that nobody decoded"
                status = f"STEP_STATUS_{outcome.status.name}"
                result = executor.StepResult(step_id=outcome.step_id, status=status)
            entry.apply.result = result.SerializeToString()
            entry.apply.num_rows = num_rows

        return self._calls.record(ask, lambda: self.scheduler.apply(outcome), _answer_apply)

    # -- the codec of its steps ----------------------------------------------------------------

    @property
    def position(self) -> str:
        """Where the latest event is in the journal, for people."""
        return self._recorder.position

    def encode(self, plan: StepPlan) -> EncodedBatch:
        """The batch of the latest plan."""
        if self._planned is not None and self._planned[0] is plan:
            return self._planned[1]
        return encode_plan(
            plan,
            scheduler_epoch=self._identity.scheduler_epoch,
            executor_epoch=self._identity.executor_epoch,
        )

    def decode(self, result: executor.StepResult, num_rows: int) -> StepOutcome:
        """The outcome of a step, to be applied next. Raises ResultUnusable."""
        self._received = (result, num_rows)
        return decode_result(result, num_rows)

    # -- parts ---------------------------------------------------------------------------------

    def checkpoint(self) -> _Entry:
        """The checkpoint of the core as it is now. Raises PicklingError."""
        checkpoint = journal.CoreCheckpoint(
            identity=self._identity,
            scheduler=dump_core(self.scheduler),
            core_structure=core_structure(),
        )
        return _Entry(core=self._number, core_checkpoint=checkpoint)

    def _schedule(self) -> StepPlan | None:
        self._planned = None
        plan = self.scheduler.schedule()
        if plan is not None:
            self._planned = plan, self.encode(plan)
        return plan

    def _answer_schedule(self, entry: _Entry, plan: StepPlan | None) -> None:
        if self._planned is not None:
            entry.schedule.batch = self._planned[1].data


def _nothing(_entry: _Entry, _result: None) -> None:
    """The call has no result."""


def _answer_evacuate(entry: _Entry, requests: list[Request]) -> None:
    entry.evacuate.CopyFrom(describe_evacuated(requests))


def _answer_take_ended(entry: _Entry, events: StepEvents) -> None:
    entry.take_ended.events.CopyFrom(describe_events(events))


def _answer_apply(entry: _Entry, events: StepEvents) -> None:
    entry.apply.events.CopyFrom(describe_events(events))
