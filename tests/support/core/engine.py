"""A scheduler core, an executor, and what their clients have got so far."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from executor_service.service import decode_batch, encode_answer
from executor_service.steps import StepExecutor
from scheduler_service.scheduler.engine.outcomes import MAX_FRUITLESS_LOSSES
from scheduler_service.scheduler.values import (
    FinishReason,
    Int32Array,
    Request,
    RowStatus,
    SchedulerConfig,
    ScoredToken,
    StepEvents,
    StepOutcome,
    StepPart,
    StepPlan,
    StepStatus,
)
from scheduler_service.step_codec import decode_result, encode_plan
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.checks import check_charges, check_plan, lengths_of
from tests.support.core.driver import EngineWithQueue
from tests.support.core.in_process import SCHEDULER_EPOCH, executor_info
from tests.support.core.plan_executor import InjectedFailure
from tests.support.fakes.expected_outputs import ExpectedOutputs, Spec
from tests.support.fakes.fake_model import fake_logprob, mix
from tests.support.fakes.fake_runner import FakeRunner, StepFault, no_fault

Message = TypeVar("Message")
STEP_NS = 100_000
# So often at most a stay in a row is told that its grammar is not compiled yet.
MAX_ASKED = 2
# More than any.
SAMPLED = MAX_ASKED + 1
# By so much a loop that waits for a grammar is woken too late.
LATE_NS = 25 * 10**9
Spoil = Callable[[StepPlan, StepOutcome], StepOutcome]
# Most parts that a step reports by itself before its result.
_MAX_PARTS = 3


class Link(Protocol[Message]):
    """Transport of plans to an executor."""

    def send(self, plan: StepPlan) -> Message:
        """Encodes the message when the step is planned."""
        ...

    def execute(self, message: Message) -> StepOutcome:
        """Executes a message and returns its outcome."""
        ...


class ProtobufLink:
    """An executor as it is, behind real messages."""

    def __init__(self, config: SchedulerConfig, runner: FakeRunner) -> None:
        self._executor = StepExecutor(executor_info(config, epoch=1), runner)

    def send(self, plan: StepPlan) -> tuple[bytes, int]:
        """See Link."""
        batch = encode_plan(plan, scheduler_epoch=SCHEDULER_EPOCH, executor_epoch=1)
        return batch.data, len(plan.work.row_ids)

    def execute(self, message: tuple[bytes, int]) -> StepOutcome:
        """See Link."""
        batch = decode_batch(pb.ScheduleBatch.FromString(message[0]))
        result = encode_answer(self._executor.execute(batch))
        return decode_result(pb.StepResult.FromString(result.SerializeToString()), message[1])


@dataclass(slots=True)
class Delivery:
    """Results that a client has received. `tokens`, `scored`: by sequence."""

    request: Request
    tokens: list[list[int]]
    scored: list[list[ScoredToken]]
    prompt_logprobs: list[ScoredToken] = field(default_factory=list)
    finished_sequences: list[int] = field(default_factory=list)
    is_finished: bool = False
    num_faults: int = 0


class CoreEngine(Generic[Message]):
    """Keeps up to `depth` steps in flight, and checks every plan. Time passes with every step.

    A step that may report parts of its result reports some before it is answered; it is executed
    with the first one.

    `needs_snapshot`: the next plan has to be one. `never_compiled`: clients whose grammar is not.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: FakeRunner,
        make_link: Callable[[SchedulerConfig, FakeRunner], Link[Message]],
        *,
        depth: int,
    ) -> None:
        self.config = config
        self.runner = runner
        self.depth = depth
        self.scheduler = EngineWithQueue(config)
        self.in_flight: deque[tuple[StepPlan, Message]] = deque()
        self.deliveries: dict[int, Delivery] = {}
        self.num_steps = 0
        self.now_ns = 0
        self.needs_snapshot = True
        self._link = make_link(config, runner)
        self._may_need_snapshot = False
        self._num_asked: dict[int, int] = {}
        # Outcome of the oldest step, if it was executed, and the tokens [R] of each row in parts.
        self._executed: StepOutcome | None = None
        self._told = np.empty(0, np.int32)
        self.never_compiled: set[int] = set()

    def tick(self, duration_ns: int) -> None:
        """Time passes."""
        self.now_ns += duration_ns
        self.scheduler.tick(self.now_ns)

    def add(self, request: Request) -> Delivery:
        """Gives the core a new request. Raises DomainError."""
        request.client_key = request.arrival
        self.scheduler.add(request)
        num_sequences = request.params.num_sequences
        delivery = Delivery(
            request, [[] for _ in range(num_sequences)], [[] for _ in range(num_sequences)]
        )
        self.deliveries[request.client_key] = delivery
        self._deliver(self.scheduler.take_ended())
        return delivery

    def adopt(self, delivery: Delivery) -> None:
        """Gives the core a request that was running elsewhere."""
        self.deliveries[delivery.request.client_key] = delivery
        self.scheduler.readmit(delivery.request)
        self._deliver(self.scheduler.take_ended())

    def abort(self, request: Request) -> None:
        """The client goes away."""
        assert self.scheduler.abort(request.request_id) is request
        self._deliver(self.scheduler.take_ended())

    # -- steps ---------------------------------------------------------------------------------

    def fill(self) -> None:
        """Plans steps until nothing more can be in flight."""
        while len(self.in_flight) < self.depth:
            before = set(self.scheduler.placement.swapped)
            plan = self.scheduler.schedule()
            while plan is None and self._wait_for_grammars():
                plan = self.scheduler.schedule()
            self._deliver(self.scheduler.take_ended())
            if plan is None:
                return
            check_plan(plan, before, self.scheduler, self.config)
            assert (plan.base_step_id is None) == self.needs_snapshot
            self.needs_snapshot = False
            self.in_flight.append((plan, self._link.send(plan)))

    def _wait_for_grammars(self) -> bool:
        """Advances the time if only rows waiting for grammars are left; returns whether it did."""
        at_ns = self.scheduler.ask_again_at_ns
        if at_ns is None or self.in_flight:
            return False
        assert at_ns > self.now_ns
        self.tick(at_ns - self.now_ns + (LATE_NS if self.never_compiled else 0))
        return True

    def answer(self, fault: StepFault | None = None, spoil: Spoil | None = None) -> StepPlan:
        """Executes the oldest step in flight. `spoil` changes what comes of it.

        Of a step that was executed for its parts, `fault` changes the outcome only.
        """
        fault = fault or StepFault()
        if self._executed is None:
            outcome = self._execute(fault)
        else:
            outcome = _with_fault(self._executed, self.in_flight[0][0], fault)
        plan = self._pop()
        has_bad_rows = spoil is not None or bool(fault.rows)
        if not has_bad_rows:
            self._check_reads(plan)
        assert outcome.status is not StepStatus.REFUSED, outcome.error
        if outcome.status is StepStatus.NEED_SNAPSHOT:
            assert self._may_need_snapshot
        elif plan.base_step_id is None:
            self._may_need_snapshot = False
        self.num_steps += 1
        self.tick(STEP_NS)
        self.take(outcome if spoil is None else spoil(plan, outcome))
        if has_bad_rows:
            # What leaned on them in this very step is known only now.
            self._check_reads(plan)
        return plan

    def _execute(self, fault: StepFault) -> StepOutcome:
        """Executes the oldest step in flight."""
        plan, message = self.in_flight[0]
        fault = replace(fault, unsampled=self._compiling(plan))
        self.runner.fault = lambda _step: fault
        outcome = self._link.execute(message)
        self._note_samples(plan, outcome)
        self.runner.fault = no_fault
        return outcome

    def _pop(self) -> StepPlan:
        """Removes the oldest step in flight, with its parts."""
        self._executed = None
        return self.in_flight.popleft()[0]

    @property
    def may_report(self) -> bool:
        """Whether the oldest step in flight may report a part of its result."""
        if not self.in_flight or not self.in_flight[0][0].work.reports_parts:
            return False
        return self._executed is None or self._executed.status is StepStatus.OK

    @property
    def told(self) -> Int32Array:
        """Number of tokens of each row in parts of the oldest step in flight; empty for none."""
        return self._told if self._executed is not None else self._told[:0]

    def report(self, seed: int) -> None:
        """Reports some of the tokens of the oldest step in flight; `seed` chooses them."""
        plan, _ = self.in_flight[0]
        if self._executed is None:
            self._executed = self._execute(StepFault())
            self._told = np.zeros(len(plan.work.row_ids), np.int32)
        outcome = self._executed
        if outcome.status is not StepStatus.OK:
            return
        left = outcome.counts - self._told
        drawn = [mix(seed, row, plan.step_id) for row in range(len(left))]
        counts = np.array([d % (n + 1) for d, n in zip(drawn, left.tolist(), strict=True)], "<i4")
        tokens = [
            outcome.tokens_of(row)[told : told + count]
            for row, (told, count) in enumerate(
                zip(self._told.tolist(), counts.tolist(), strict=True)
            )
        ]
        self._told = self._told + counts
        token_ids = np.array([token for each in tokens for token in each], np.int32)
        self.take_part(StepPart(plan.step_id, counts, token_ids))

    def take_part(self, part: StepPart) -> None:
        """Gives the core a part of a result. Raises ContractBroken."""
        lengths = lengths_of(self.scheduler)
        events = self.scheduler.take_part(part)
        check_charges(self.scheduler, lengths, Counter(events.num_sampled))
        self._deliver(events)

    def _compiling(self, plan: StepPlan) -> list[int]:
        """Rows whose grammar is not compiled yet: some stays are asked several times at first.

        A row of a sampled stay is never among them, whatever the core thinks of it.
        """
        work = plan.work
        samples = [True] * len(work.row_ids) if work.samples is None else work.samples.tolist()
        found = []
        for row_id, stay_id, is_asked in zip(
            work.row_ids.tolist(), work.stay_ids.tolist(), samples, strict=True
        ):
            num_asked = self._num_asked.get(stay_id, 0)
            most = stay_id % (MAX_ASKED + 1)
            sequence = self.scheduler.placement.sequence_of(row_id, stay_id)
            if sequence is not None and sequence.request.client_key in self.never_compiled:
                most = MAX_ASKED
                num_asked = min(num_asked, MAX_ASKED - 1) if num_asked != SAMPLED else SAMPLED
            if is_asked and num_asked < most:
                self._num_asked[stay_id] = num_asked + 1
                found.append(row_id)
        return found

    def _note_samples(self, plan: StepPlan, outcome: StepOutcome) -> None:
        for stay_id, count in zip(plan.work.stay_ids.tolist(), outcome.counts, strict=False):
            if count > 0:
                self._num_asked[stay_id] = SAMPLED

    def _check_reads(self, plan: StepPlan) -> None:
        """Checks that only rows whose results are lost read missing blocks."""
        work, placement = plan.work, self.scheduler.placement
        for row_id, stay_id in zip(work.row_ids.tolist(), work.stay_ids.tolist(), strict=True):
            if self.runner.violations and placement.sequence_of(row_id, stay_id) is not None:
                prefix = f"step {plan.step_id}: row {row_id} "
                found = [v for v in self.runner.violations if v.startswith(prefix)]
                assert not found, found
        self.runner.violations.clear()

    def fail(self) -> None:
        """The oldest step in flight fails as a whole."""
        self.count_fault()
        self.answer(StepFault(InjectedFailure("a step that was to fail")))

    def skip(self, status: StepStatus) -> None:
        """The oldest step in flight is not executed."""
        plan = self._pop()
        self.count_fault()
        self._may_need_snapshot = True
        self.take(StepOutcome(plan.step_id, status))

    def step(self) -> bool:
        """Plans what can be planned, executes one step; False if there is nothing to do."""
        self.fill()
        if not self.in_flight:
            return False
        step_id = self.in_flight[0][0].step_id
        for number in range(mix(step_id, 0, 0) % (_MAX_PARTS + 1)):
            if self.may_report:
                self.report(number)
                self.fill()
        self.answer()
        return True

    def count_fault(self) -> None:
        """Counts a loss that may concern any unfinished request."""
        for delivery in self.deliveries.values():
            delivery.num_faults += not delivery.is_finished

    def take(self, outcome: StepOutcome) -> None:
        """Gives the core a result. Raises ContractBroken."""
        lengths = lengths_of(self.scheduler)
        events = self.scheduler.apply(outcome)
        check_charges(self.scheduler, lengths, Counter(events.num_sampled))
        self._deliver(events)
        self.needs_snapshot |= outcome.status in (StepStatus.NEED_SNAPSHOT, StepStatus.REFUSED)

    # -- clients -------------------------------------------------------------------------------

    def _deliver(self, events: StepEvents) -> None:
        for scored in events.prompt_logprobs:
            self._of(scored[0]).prompt_logprobs += scored[1]
        keys, token_ids = events.client_keys.tolist(), events.token_ids.tolist()
        for key, token_id in zip(keys, token_ids, strict=True):
            assert not self.deliveries[key].is_finished
            self.deliveries[key].tokens[0].append(token_id)
        for event in events.tokens:
            delivery, index = self._of(event.sequence.request), event.sequence.index
            assert index not in delivery.finished_sequences
            delivery.tokens[index].append(event.token_id)
            if event.scored is not None:
                assert event.scored.token_id == event.token_id
                delivery.scored[index].append(event.scored)
        for sequence in events.finished_sequences:
            self._of(sequence.request).finished_sequences.append(sequence.index)
        for request in events.finished:
            self._of(request).is_finished = True

    def _of(self, request: Request) -> Delivery:
        delivery = self.deliveries[request.client_key]
        assert delivery.request is request
        assert not delivery.is_finished, "something after the end"
        return delivery


def _with_fault(outcome: StepOutcome, plan: StepPlan, fault: StepFault) -> StepOutcome:
    """Returns `outcome` of a step that reported parts, with `fault`."""
    if fault.error is not None:
        return StepOutcome(plan.step_id, StepStatus.FAILED, error=str(fault.error))
    bad = [fault.rows.get(row_id) for row_id in plan.work.row_ids.tolist()]
    if outcome.status is not StepStatus.OK or not any(bad):
        return outcome
    statuses = outcome.row_statuses or [RowStatus.OK] * len(bad)
    statuses = [new or old for new, old in zip(bad, statuses, strict=True)]
    return replace(outcome, row_statuses=statuses)


@dataclass(slots=True)
class Client:
    """`is_aborted`, `has_bad_row`, `saw_broken_core`: what was done to its request."""

    spec: Spec
    truth: ExpectedOutputs
    delivery: Delivery
    is_aborted: bool = False
    has_bad_row: bool = False
    saw_broken_core: bool = False

    @property
    def request(self) -> Request:
        """The request itself."""
        return self.delivery.request

    def check(self, config: SchedulerConfig) -> None:
        """Checks all received results, and that they are complete if the request ended well."""
        delivery, params = self.delivery, self.spec.params
        if params.is_streamed:
            each = zip(self._expected_tokens(), delivery.tokens, delivery.scored, strict=True)
            for expected, tokens, scored in each:
                assert tokens == expected[: len(tokens)]
                if params.num_logprobs is not None:
                    self._check_scores(tokens, scored, params.num_logprobs)
        else:
            assert not any(delivery.tokens)
        num_scored = len(delivery.prompt_logprobs)
        if num_scored:
            assert params.num_prompt_logprobs is not None
            known = self.spec.prompt[1 : num_scored + 1]
            logprobs = self.truth.prompt_logprobs[:num_scored]
            num_top = params.num_prompt_logprobs
            self._check_scores(known, delivery.prompt_logprobs, num_top, logprobs)
            positions = [scored.position for scored in delivery.prompt_logprobs]
            assert positions == list(range(1, num_scored + 1))
        assert delivery.is_finished == self.request.is_finished
        if delivery.is_finished:
            self._check_end(config)

    def _expected_tokens(self) -> list[list[int]]:
        return [output[self.spec.num_resumed :] for output in self.truth.outputs]

    def _check_scores(
        self,
        token_ids: Items[int],
        scored: Items[ScoredToken],
        num_top: int,
        logprobs: Items[float] | None = None,
    ) -> None:
        if logprobs is None:
            logprobs = [fake_logprob(token_id) for token_id in token_ids]
        assert [score.token_id for score in scored] == list(token_ids)
        assert [score.logprob for score in scored] == logprobs
        assert all(len(score.top) == num_top for score in scored)

    def _check_end(self, config: SchedulerConfig) -> None:
        match self.request.finish_reason:
            case FinishReason.ABORTED:
                assert self.is_aborted
            case FinishReason.ERROR:
                self._check_error(config)
            case _:
                self._check_result()

    def _check_error(self, config: SchedulerConfig) -> None:
        assert self.request.error is not None
        match self.request.error[0]:
            case "INVALID_LOGITS" | "ROW_FAILED":
                assert self.has_bad_row
            case "INVARIANT_BROKEN":
                assert self.saw_broken_core
            case "EXECUTOR_LOST_REPEATEDLY":
                assert self.delivery.num_faults >= MAX_FRUITLESS_LOSSES
            case "DEADLINE_UNREACHABLE":
                assert config.queue_policy == "deadline"
                assert self.spec.scheduling.deadline_ns is not None
            case _:
                raise AssertionError(f"{self.request.error}")

    def _check_result(self) -> None:
        request, delivery, truth = self.request, self.delivery, self.truth
        assert request.finish_reason is truth.reasons[0]
        if self.spec.params.is_streamed:
            assert delivery.tokens == self._expected_tokens()
            assert [s.finish_reason for s in request.sequences] == truth.reasons
            indexes = list(range(len(truth.outputs))) if len(truth.outputs) > 1 else []
            assert sorted(delivery.finished_sequences) == indexes
        else:
            assert [c.token_ids for c in request.completions] == truth.outputs
            assert [c.finish_reason for c in request.completions] == truth.reasons
            self._check_completions()
        if self.spec.params.num_prompt_logprobs is not None and not self.spec.num_resumed:
            assert len(delivery.prompt_logprobs) == len(self.spec.prompt) - 1

    def _check_completions(self) -> None:
        for completion in self.request.completions:
            logprobs = map(fake_logprob, completion.token_ids)
            assert completion.cumulative_logprob == sum(logprobs)
            if self.spec.params.num_logprobs is not None:
                num_top = self.spec.params.num_logprobs
                self._check_scores(completion.token_ids, completion.scored, num_top)
        if self.spec.params.beam is not None:
            assert [c.score for c in self.request.completions] == self.truth.scores
