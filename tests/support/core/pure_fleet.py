"""A scheduler whose executors compute in this process, without an event loop.

Events go in, and effects are executed. A step is computed and answered when the test says so. Time
is a number that the test, or `run`, moves.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from scheduler_service.journal import Journal, NoJournal
from scheduler_service.scheduler import ExecutorState, LossCause, Scheduler, effects, events
from scheduler_service.scheduler.values import (
    FleetConfig,
    Request,
    SamplingParams,
    SchedulingParams,
    StepEvents,
    StepOutcome,
    StepPlan,
    StepStatus,
)
from scheduler_service.step_codec import (
    EncodedBatch,
    ReceivedResult,
    ResultUnusable,
    decode_part,
    decode_result,
    encode_plan,
)
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.in_process import SCHEDULER_EPOCH
from tests.support.core.machines import VOCAB_SIZE, Machine
from tests.support.fakes.fake_model import expected_tokens
from tests.support.fakes.fake_runner import StepFault

FLEET = FleetConfig()
NUM_CREDITS = 2
MAX_TOKENS = 10
RETURN_S = 30.0
NO_WISHES = SchedulingParams()
_MAX_TICKS = 100
_MAX_ROUNDS = 10_000

AnyEffect = TypeVar("AnyEffect")


class PureFleet:
    """A `Scheduler` with its executors and clients.

    `held`: steps in flight with their batches, by address, oldest first. `loads`: adapters that an
    executor was told to load, by address, and has not loaded yet. `effects`: all so far.
    `wakes_at_ns`: as the latest `WakeAt` says. `tokens`, `prompt_positions`: results of clients, by
    `client_key`; of requests of one sequence. `finished`: requests that ended, by id.
    `last_step_ids`: by address and epoch of executors that are gone.
    """

    def __init__(self, config: FleetConfig = FLEET, journal: Journal | None = None) -> None:
        """Creates a fleet without executors. `journal`: records all events."""
        self.scheduler = Scheduler(config)
        self._journal = journal or NoJournal()
        self._journal.begin(self.scheduler, config)
        self.now_ns = 0
        self.machines: dict[str, Machine] = {}
        self.held: dict[str, deque[tuple[StepPlan, EncodedBatch]]] = {}
        self.loads: dict[str, deque[effects.LoadAdapter]] = {}
        # By address: result of the oldest step, if it was computed for its parts, and the number of
        # tokens that each row has in parts.
        self._computed: dict[str, tuple[pb.StepResult, int]] = {}
        self.last_step_ids: dict[tuple[str, int], int] = {}
        # Batches of effects that are being executed.
        self._unsent: deque[EncodedBatch] = deque()
        self.effects: list[effects.Effect] = []
        self.wakes_at_ns: int | None = None
        self.tokens: dict[int, list[int]] = {}
        self.prompt_positions: dict[int, list[int]] = {}
        self.finished: dict[str, Request] = {}

    def handle(
        self, event: events.Event, received: ReceivedResult | None = None
    ) -> list[effects.Effect]:
        """Passes an event in and executes its effects, which are returned."""
        record = self._journal.record(event, self.now_ns, received)
        try:
            found = self.scheduler.handle(event, self.now_ns)
        except Exception as error:
            record.raised(error)
            raise
        batches = [self._encode(each) for each in found if isinstance(each, effects.SendStep)]
        record.done(found, batches)
        self.effects += found
        self._unsent += batches
        for effect in found:
            self._execute(effect)
        self._check()
        return found

    def effects_of(self, kind: type[AnyEffect]) -> list[AnyEffect]:
        """Effects of one kind so far, in order."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    # -- executors -----------------------------------------------------------------------------

    def join(
        self,
        machine: Machine,
        *,
        num_credits: int = NUM_CREDITS,
        last_step_id: int = 0,
        is_connected: bool = True,
    ) -> list[effects.Effect]:
        """The executor registers; `is_connected`: and serves."""
        joined = events.ExecutorJoined(
            machine.address,
            machine.epoch,
            machine.config,
            num_credits,
            last_step_id,
            scheduler_epoch=SCHEDULER_EPOCH,
        )
        self.machines[machine.address] = machine
        found = self.handle(joined)
        return [*found, *self.connect(machine)] if is_connected else found

    def connect(self, machine: Machine) -> list[effects.Effect]:
        """The executor, which registered, serves."""
        return self.handle(events.ExecutorConnected(machine.address))

    def lose(self, machine: Machine, cause: LossCause = LossCause.DIED) -> list[effects.Effect]:
        """The executor is gone, with the results of its steps."""
        return self.handle(events.ExecutorLost(machine.address, cause, "the test lets it go"))

    def executor(self, machine: Machine) -> ExecutorState:
        """State of an executor in the scheduler."""
        return self.scheduler.executors[machine.address]

    def requests_at(self, machine: Machine) -> list[str]:
        """Requests that an executor has not finished."""
        return sorted(self.executor(machine).engine.unfinished_request_ids)

    # -- requests ------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> list[effects.Effect]:
        """Clients submit requests. Raises DomainError for one that is refused."""
        found: list[effects.Effect] = []
        for request in requests:
            self.scheduler.check(request)
            found += self.handle(events.RequestSubmitted(request))
        return found

    def abort(self, request_id: str) -> list[effects.Effect]:
        """A client ends its request."""
        return self.handle(events.RequestAborted(request_id))

    # -- time and steps ------------------------------------------------------------------------

    def settle(self) -> list[effects.Effect]:
        """Passes the ticks that are due."""
        found: list[effects.Effect] = []
        for _ in range(_MAX_TICKS):
            if self.wakes_at_ns is None or self.wakes_at_ns > self.now_ns:
                return found
            self.wakes_at_ns = None
            found += self.handle(events.Tick())
        raise AssertionError(f"asks {_MAX_TICKS} times to be woken at {self.now_ns}")

    def pass_time(self, seconds: float) -> list[effects.Effect]:
        """Time passes, and every tick comes when it is due."""
        found, end_ns = self.settle(), self.now_ns + round(seconds * 1e9)
        while self.wakes_at_ns is not None and self.wakes_at_ns <= end_ns:
            self.now_ns = max(self.now_ns, self.wakes_at_ns)
            found += self.settle()
        self.now_ns = end_ns
        return found

    def answer(
        self,
        machine: Machine,
        alter: Callable[[pb.StepResult], None] | None = None,
        fault: StepFault | None = None,
    ) -> list[effects.Effect]:
        """The executor executes its oldest step. `alter` may change the result, `fault` fails.

        A step that was computed for its parts does not fail any more.
        """
        plan, batch = self.held[machine.address].popleft()
        computed = self._computed.pop(machine.address, None)
        result = machine.compute(batch, fault) if computed is None else computed[0]
        if alter is not None:
            alter(result)
        return self._receive(machine, plan, pb.StepResult.FromString(result.SerializeToString()))

    def report(self, machine: Machine) -> list[effects.Effect]:
        """The executor reports the next token of each row of its oldest step, if there is one."""
        plan, batch = self.held[machine.address][0]
        if not plan.work.reports_parts:
            return []
        computed = self._computed.get(machine.address)
        result, num_told = (machine.compute(batch), 0) if computed is None else computed
        self._computed[machine.address] = result, num_told + 1
        outcome = decode_result(result, len(plan.work.row_ids))
        if outcome.status is not StepStatus.OK:
            return []
        rows = range(len(plan.work.row_ids))
        runs = [outcome.tokens_of(row)[num_told : num_told + 1] for row in rows]
        offsets = np.cumsum([0, *map(len, runs)])
        part = pb.StepResult(
            step_id=plan.step_id,
            status=pb.STEP_STATUS_PARTIAL,
            sampled_token_ids=np.array([token for run in runs for token in run], "<i4").tobytes(),
            sampled_offsets=offsets.astype("<i4").tobytes(),
        )
        event = events.StepProgressed(machine.address, decode_part(part, len(runs)))
        return self.handle(event, ReceivedResult(part, len(runs)))

    def skip(self, machine: Machine) -> list[effects.Effect]:
        """The executor does not execute its oldest step."""
        plan, _ = self.held[machine.address].popleft()
        self._computed.pop(machine.address, None)
        is_snapshot = plan.base_step_id is None
        status = pb.STEP_STATUS_REFUSED if is_snapshot else pb.STEP_STATUS_NEED_SNAPSHOT
        return self._receive(machine, plan, pb.StepResult(step_id=plan.step_id, status=status))

    def refuse(self, machine: Machine) -> list[effects.Effect]:
        """The oldest step in flight was too large to be sent."""
        plan, _ = self.held[machine.address].popleft()
        self._computed.pop(machine.address, None)
        outcome = StepOutcome(plan.step_id, StepStatus.REFUSED)
        return self.handle(events.StepCompleted(machine.address, outcome, was_sent=False))

    def end_load(self, address: str, why_not: str = "") -> list[effects.Effect]:
        """The executor has loaded the first adapter that it was told to load; or it cannot."""
        adapter = self.loads[address].popleft().adapter
        return self.handle(events.AdapterLoaded(address, adapter, why_not))

    def _receive(
        self, machine: Machine, plan: StepPlan, result: pb.StepResult
    ) -> list[effects.Effect]:
        num_rows = len(plan.work.row_ids) if result.step_id == plan.step_id else 0
        try:
            outcome = decode_result(result, num_rows)
        except ResultUnusable as error:
            return self.handle(events.ExecutorLost(machine.address, LossCause.DIED, str(error)))
        received = ReceivedResult(result, num_rows)
        return self.handle(events.StepCompleted(machine.address, outcome), received)

    def run(self) -> None:
        """Lets all executors answer by turns, and time pass, until no request is left."""
        for _ in range(_MAX_ROUNDS):
            self.settle()
            for address in [each for each, loads in self.loads.items() if loads]:
                self.end_load(address)
            busy = [address for address, held in self.held.items() if held]
            if not self.scheduler.locations and not busy:
                return
            for address in busy:
                if self.held.get(address):
                    self.answer(self.machines[address])
            if not busy and not any(self.loads.values()):
                assert self.wakes_at_ns is not None, f"hang: {sorted(self.scheduler.locations)}"
                self.now_ns = max(self.now_ns, self.wakes_at_ns)
        raise AssertionError(f"run for ever: {sorted(self.scheduler.locations)}")

    # -- effects -------------------------------------------------------------------------------

    def _encode(self, effect: effects.SendStep) -> EncodedBatch:
        epoch = self.machines[effect.address].epoch
        return encode_plan(effect.plan, scheduler_epoch=SCHEDULER_EPOCH, executor_epoch=epoch)

    def _execute(self, effect: effects.Effect) -> None:
        match effect:
            case effects.SendStep(address, plan):
                self.held[address].append((plan, self._unsent.popleft()))
            case effects.DeliverTokens(found):
                self._deliver(found)
            case effects.RequestFinished(request):
                self._finish(request)
            case effects.WakeAt(at_ns):
                self.wakes_at_ns = at_ns
            case effects.ExecutorGone(address, epoch=epoch, last_step_id=last_step_id):
                self.held.pop(address, None)
                self._computed.pop(address, None)
                self.loads.pop(address, None)
                self.last_step_ids[address, epoch] = last_step_id
            case effects.ExecutorServes(address):
                self.held[address] = deque()
                self.loads[address] = deque()
            case effects.LoadAdapter(address):
                self.loads[address].append(effect)
            case _:
                pass

    def _deliver(self, found: StepEvents) -> None:
        for key, token_id in zip(found.client_keys.tolist(), found.token_ids.tolist(), strict=True):
            self.tokens.setdefault(key, []).append(token_id)
        for event in found.tokens:
            request = event.sequence.request
            if request.params.num_sequences == 1:
                self.tokens.setdefault(request.client_key, []).append(event.token_id)
        for request, scores in found.prompt_logprobs:
            positions = self.prompt_positions.setdefault(request.client_key, [])
            positions += [scored.position for scored in scores]
        for request in found.finished:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        assert request.is_finished
        assert request.request_id not in self.finished, "ended twice"
        self.finished[request.request_id] = request

    def _check(self) -> None:
        """Every unfinished request is in one place, and steps in flight are those sent."""
        scheduler = self.scheduler
        held_by = Counter(
            request_id
            for executor in scheduler.executors.values()
            for request_id in executor.engine.unfinished_request_ids
        )
        assert max(held_by.values(), default=1) == 1, "a request is at two executors"
        num_waiting = 0
        for request_id, place in scheduler.locations.items():
            assert request_id not in self.finished
            if place.executor is None:
                num_waiting += 1
                assert request_id not in held_by
            else:
                assert scheduler.executors[place.executor.address] is place.executor
                assert request_id in place.executor.engine.unfinished_request_ids
        assert num_waiting == scheduler.num_waiting
        for address, executor in scheduler.executors.items():
            num_held = len(self.held.get(address, ()))
            assert executor.engine.num_in_flight == num_held <= executor.num_credits


class Broken:
    """A function of an engine that raises at its `at_call`-th call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.at_call = 1
        self.error: Exception = AssertionError("block 3 freed twice")
        original, calls = getattr(owner, name), itertools.count(1)

        def call(part: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            if next(calls) == self.at_call:
                raise self.error
            return original(part, *arguments, **named)

        monkeypatch.setattr(owner, name, call)


def a_request(number: int, scheduling: SchedulingParams = NO_WISHES, **params: object) -> Request:
    """Returns a request for 10 tokens after a short prompt; its name is r1, r2, ..."""
    values: dict[str, object] = {"max_tokens": MAX_TOKENS} | params
    request = Request.create(
        f"r{number}",
        _prompt(number),
        SamplingParams(**values),  # type: ignore[arg-type]
        arrival=number,
        seed=number,
        scheduling=scheduling,
    )
    request.client_key = number
    return request


def tokens_of(number: int, num_tokens: int = MAX_TOKENS) -> list[int]:
    """Expected tokens of `a_request(number)`."""
    return expected_tokens(_prompt(number), num_tokens, number, VOCAB_SIZE)


def _prompt(number: int) -> list[int]:
    return [number % VOCAB_SIZE, 2, 3]


def kinds(found: list[effects.Effect]) -> list[type[effects.Effect]]:
    """Types of effects."""
    return [type(effect) for effect in found]


def a_machine(number: int = 1, **changes: object) -> Machine:
    """Executor with this number in its address."""
    return Machine(f"executor:{number}", **changes)  # type: ignore[arg-type]


def a_fleet(*machines: Machine, **config: object) -> PureFleet:
    """Fleet in which these executors have joined; lost ones are expected back for 30 s."""
    fleet = PureFleet(FleetConfig(executor_return_s=RETURN_S, **config))  # type: ignore[arg-type]
    for machine in machines:
        fleet.join(machine)
    return fleet
