"""Which effects follow from each event, and in which order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_service.scheduler import events
from scheduler_service.scheduler.effects import (
    AcquittalReason,
    DeliverTokens,
    Effect,
    ExecutorGone,
    ExecutorHealthChanged,
    ExecutorServes,
    HealthChange,
    MoveReason,
    RequestAcquitted,
    RequestAssigned,
    RequestBlamed,
    RequestFinished,
    RequestMoved,
    RequestQuarantined,
    SendStep,
    WakeAt,
)
from scheduler_service.scheduler.engine.engine import Engine
from scheduler_service.scheduler.engine.planning.lateness import MAX_REFUSALS
from scheduler_service.scheduler.executor_losses import RETURN_NS, LossCause
from scheduler_service.scheduler.values.admission import AssignedFor
from scheduler_service.scheduler.values.config import Feature, FleetConfig
from scheduler_service.scheduler.values.plan import StepOutcome, StepStatus
from scheduler_service.scheduler.values.request import FinishReason, SchedulingParams
from splitserve_rpc.domain_error import DomainError
from tests.support.core.machines import CONFIG, VOCAB_SIZE, Machine
from tests.support.core.pure_fleet import Broken, PureFleet, a_request, tokens_of

RETURN_S = 30.0
MS = 1_000_000


def kinds(effects: list[Effect]) -> list[type[Effect]]:
    return [type(effect) for effect in effects]


def a_fleet(*machines: Machine, **config: object) -> PureFleet:
    fleet = PureFleet(FleetConfig(executor_return_s=RETURN_S, **config))  # type: ignore[arg-type]
    for machine in machines:
        fleet.join(machine)
    return fleet


def a_machine(number: int = 1, **changes: object) -> Machine:
    return Machine(f"executor:{number}", **changes)  # type: ignore[arg-type]


# -- each event ------------------------------------------------------------------------------------


def _join(fleet: PureFleet) -> list[Effect]:
    return fleet.join(a_machine(2), is_connected=False)


def _connect(fleet: PureFleet) -> list[Effect]:
    machine = a_machine(2)
    fleet.join(machine, is_connected=False)
    return fleet.connect(machine)


def _submit(fleet: PureFleet) -> list[Effect]:
    return fleet.submit(a_request(2))


def _submit_to_idle(fleet: PureFleet) -> list[Effect]:
    fleet.join(a_machine(2))
    fleet.settle()
    return fleet.submit(a_request(2))


def _tick(fleet: PureFleet) -> list[Effect]:
    fleet.join(a_machine(2))
    fleet.submit(a_request(2))
    return fleet.settle()


def _answer(fleet: PureFleet) -> list[Effect]:
    return fleet.answer(fleet.machines["executor:1"])


def _abort(fleet: PureFleet) -> list[Effect]:
    return fleet.abort("r1")


def _abort_unknown(fleet: PureFleet) -> list[Effect]:
    return fleet.abort("nobody's")


def _doubt(fleet: PureFleet) -> list[Effect]:
    return fleet.handle(events.ExecutorDoubted("executor:1", is_doubtful=True))


def _drain(fleet: PureFleet) -> list[Effect]:
    return fleet.handle(events.ExecutorDraining("executor:1"))


def _expire(fleet: PureFleet) -> list[Effect]:
    fleet.handle(events.ExecutorDraining("executor:1"))
    return fleet.handle(events.ExecutorDrainExpired("executor:1"))


def _undrain(fleet: PureFleet) -> list[Effect]:
    fleet.handle(events.ExecutorDraining("executor:1"))
    return fleet.handle(events.ExecutorUndrained("executor:1"))


def _lose(fleet: PureFleet) -> list[Effect]:
    return fleet.lose(fleet.machines["executor:1"])


def _weigh(fleet: PureFleet) -> list[Effect]:
    return fleet.handle(events.TenantsWeighed({"a": 2.0}))


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (_join, []),
        (_connect, [ExecutorServes, WakeAt]),
        (_submit, []),
        (_submit_to_idle, [WakeAt]),
        (_tick, [RequestAssigned, SendStep, SendStep]),
        (_answer, [SendStep, DeliverTokens]),
        (_abort, [DeliverTokens, WakeAt]),
        (_abort_unknown, []),
        (_doubt, []),
        (_drain, []),
        (_expire, [RequestMoved, ExecutorGone, WakeAt]),
        (_undrain, []),
        (_lose, [ExecutorGone, WakeAt]),
        (_weigh, []),
    ],
)
def test_event_has_these_effects_when_one_executor_runs_one_request(
    event: Callable[[PureFleet], list[Effect]], expected: list[type[Effect]]
) -> None:
    fleet = a_fleet(a_machine())
    fleet.submit(a_request(1))
    fleet.settle()
    assert kinds(event(fleet)) == expected


@pytest.mark.parametrize(
    "event",
    [
        events.ExecutorConnected("nobody:1"),
        events.ExecutorDoubted("nobody:1", is_doubtful=True),
        events.ExecutorDraining("nobody:1"),
        events.ExecutorDrainExpired("nobody:1"),
        events.ExecutorUndrained("nobody:1"),
        events.ExecutorLost("nobody:1", LossCause.DIED, "it never was"),
        events.ExecutorDrainExpired("executor:1"),
        events.ExecutorUndrained("executor:1"),
    ],
    ids=str,
)
def test_event_changes_nothing_when_it_is_of_an_executor_that_is_not_there_or_does_not_drain(
    event: events.ExecutorEvent,
) -> None:
    fleet = a_fleet(a_machine())
    fleet.submit(a_request(1))
    fleet.settle()
    assert fleet.handle(event) == []
    assert fleet.requests_at(fleet.machines["executor:1"]) == ["r1"]


def test_result_changes_nothing_when_its_executor_is_gone() -> None:
    fleet, machine = a_fleet(a_machine()), a_machine()
    fleet.submit(a_request(1))
    fleet.settle()
    held = fleet.held[machine.address]
    fleet.lose(machine)
    fleet.held[machine.address] = held
    assert fleet.answer(machine) == []
    assert fleet.tokens == {}


def test_nothing_changes_when_no_engine_can_be_made_for_a_new_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = a_fleet(a_machine())
    fleet.submit(a_request(1))
    with monkeypatch.context() as context:
        Broken(context, Engine, "__init__").error = MemoryError("too many blocks")
        with pytest.raises(MemoryError):
            fleet.handle(events.ExecutorJoined("executor:1", 2, CONFIG, 2))
    assert fleet.scheduler.executors["executor:1"].epoch == 1
    fleet.run()
    assert fleet.tokens == {1: tokens_of(1)}


def test_nothing_changes_when_a_request_is_refused() -> None:
    fleet = a_fleet(a_machine(max_num_seqs=1), max_num_waiting=1)
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.submit(a_request(2))
    with pytest.raises(DomainError, match="1 requests wait; allowed: 1"):
        fleet.submit(a_request(3))
    with pytest.raises(DomainError):
        fleet.submit(a_request(4, max_tokens=10_000))
    fleet.run()
    assert fleet.tokens == {1: tokens_of(1), 2: tokens_of(2)}


# -- order -----------------------------------------------------------------------------------------


def test_next_step_is_sent_before_clients_are_told_of_the_last_one() -> None:
    fleet, machine = a_fleet(), a_machine()
    fleet.join(machine, num_credits=1)
    fleet.submit(a_request(1))
    fleet.settle()
    for _ in range(3):
        assert kinds(fleet.answer(machine)) == [SendStep, DeliverTokens]


def test_request_is_assigned_before_its_first_step_is_sent() -> None:
    fleet = a_fleet(a_machine(max_num_seqs=1))
    for number in (1, 2, 3):
        fleet.submit(a_request(number))
    fleet.run()
    begun: set[str] = set()
    for effect in fleet.effects:
        match effect:
            case RequestAssigned(request):
                begun.add(request.request_id)
            case SendStep(_, plan):
                assert len(begun) >= len(plan.work.row_ids) > 0
            case DeliverTokens(found):
                assert {request.request_id for request in found.finished} <= begun
            case _:
                pass
    assert begun == fleet.finished.keys() == {"r1", "r2", "r3"}


def test_request_knows_when_it_was_submitted() -> None:
    fleet, request = a_fleet(), a_request(1)
    fleet.now_ns = 5 * MS
    fleet.submit(request)
    assert request.submitted_ns == 5 * MS


def test_requests_that_arrive_together_begin_in_one_step() -> None:
    fleet = a_fleet(a_machine())
    fleet.settle()
    fleet.submit(*map(a_request, (1, 2, 3)))
    (sent,) = [each for each in fleet.settle() if isinstance(each, SendStep)][:1]
    assert len(sent.plan.work.row_ids) == 3


@pytest.mark.parametrize("num_credits", [1, 2, 3])
def test_no_more_steps_are_in_flight_than_the_executor_has_credits(num_credits: int) -> None:
    fleet, machine = a_fleet(), a_machine()
    fleet.join(machine, num_credits=num_credits)
    fleet.submit(a_request(1))
    fleet.settle()
    assert len(fleet.held[machine.address]) == num_credits
    fleet.answer(machine)
    assert len(fleet.held[machine.address]) == num_credits


# -- executors that come and go --------------------------------------------------------------------


def test_executor_gets_no_requests_before_it_is_connected() -> None:
    fleet, machine = a_fleet(), a_machine()
    fleet.join(machine, is_connected=False)
    fleet.submit(a_request(1))
    fleet.settle()
    assert fleet.scheduler.num_waiting == 1
    assert kinds(fleet.connect(machine)) == [ExecutorServes, WakeAt]
    assert kinds(fleet.settle()) == [RequestAssigned, SendStep, SendStep]


def test_no_step_is_planned_when_an_executor_was_lost_before_the_tick() -> None:
    fleet, machine = a_fleet(a_machine()), a_machine()
    fleet.submit(a_request(1))
    fleet.lose(machine)
    assert not any(isinstance(effect, SendStep) for effect in fleet.settle())
    assert fleet.scheduler.num_waiting == 1


def test_requests_move_to_the_new_life_when_an_executor_is_replaced_at_its_address() -> None:
    fleet, machine = a_fleet(a_machine()), a_machine()
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.answer(machine)
    machine.restart()

    found = fleet.join(machine)

    assert kinds(found) == [ExecutorGone, WakeAt, ExecutorServes, WakeAt]
    gone = found[0]
    assert isinstance(gone, ExecutorGone)
    assert (gone.epoch, gone.cause) == (1, LossCause.DIED)
    assert gone.why == "a new executor answers at its address"
    assert fleet.executor(machine).epoch == 2
    fleet.run()
    assert fleet.tokens == {1: tokens_of(1)}


def test_steps_are_numbered_on_when_a_life_comes_back() -> None:
    fleet, machine = a_fleet(a_machine()), a_machine()
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.lose(machine)
    (gone,) = fleet.effects_of(ExecutorGone)
    assert gone.last_step_id == fleet.effects_of(SendStep)[-1].plan.step_id > 0
    fleet.join(machine, num_credits=1, last_step_id=gone.last_step_id)
    fleet.settle()
    assert fleet.effects_of(SendStep)[-1].plan.step_id == gone.last_step_id + 1
    fleet.run()
    assert fleet.tokens == {1: tokens_of(1)}


def test_requests_of_a_lost_executor_go_on_in_order_of_arrival() -> None:
    first, second = a_machine(1), a_machine(2, max_num_seqs=1)
    fleet = a_fleet(first)
    fleet.submit(*map(a_request, (1, 2, 3)))
    fleet.settle()
    fleet.answer(first)
    fleet.join(second)
    fleet.lose(first)
    fleet.run()
    assigned = [each.request.request_id for each in fleet.effects_of(RequestAssigned)]
    assert assigned == ["r1", "r2", "r3"] * 2
    assert fleet.tokens == {number: tokens_of(number) for number in (1, 2, 3)}


# -- drains ----------------------------------------------------------------------------------------


def test_executor_that_drains_keeps_what_runs_and_gets_nothing_new() -> None:
    going, staying = a_machine(1), a_machine(2)
    fleet = a_fleet(going)
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.handle(events.ExecutorDraining(going.address))
    fleet.submit(a_request(2))
    fleet.settle()
    assert fleet.requests_at(going) == ["r1"]
    fleet.join(staying)
    fleet.settle()
    assert fleet.requests_at(staying) == ["r2"]
    fleet.run()
    (gone,) = fleet.effects_of(ExecutorGone)
    assert (gone.address, gone.is_drained, gone.num_moved) == (going.address, True, 0)
    assert fleet.tokens == {1: tokens_of(1), 2: tokens_of(2)}


def test_requests_move_when_the_time_of_a_drain_is_over() -> None:
    going, staying = a_machine(1), a_machine(2)
    fleet = a_fleet(going)
    fleet.submit(a_request(1), a_request(2))
    fleet.settle()
    fleet.answer(going)
    fleet.join(staying)
    fleet.handle(events.ExecutorDraining(going.address))

    found = fleet.handle(events.ExecutorDrainExpired(going.address))

    moved = [each for each in found if isinstance(each, RequestMoved)]
    assert [(each.request.request_id, each.reason) for each in moved] == [
        ("r1", MoveReason.DRAINED),
        ("r2", MoveReason.DRAINED),
    ]
    (gone,) = fleet.effects_of(ExecutorGone)
    assert (gone.is_drained, gone.num_moved, gone.cause) == (True, 2, LossCause.BLAMELESS)
    fleet.settle()
    assert fleet.requests_at(staying) == ["r1", "r2"]
    fleet.run()
    assert fleet.tokens == {1: tokens_of(1), 2: tokens_of(2)}


def test_executor_serves_on_when_its_drain_is_undone() -> None:
    machine = a_machine(max_num_seqs=1)
    fleet = a_fleet(machine)
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.handle(events.ExecutorDraining(machine.address))
    fleet.submit(a_request(2))
    fleet.handle(events.ExecutorUndrained(machine.address))
    fleet.run()
    assert fleet.effects_of(ExecutorGone) == []
    assert fleet.tokens == {1: tokens_of(1), 2: tokens_of(2)}


def test_idle_executor_is_gone_at_once_when_it_drains() -> None:
    fleet = a_fleet(a_machine())
    fleet.settle()
    found = fleet.handle(events.ExecutorDraining("executor:1"))
    assert isinstance(found[0], ExecutorGone)


# -- doubt -----------------------------------------------------------------------------------------


def test_executor_gets_nothing_new_while_it_is_doubtful_and_keeps_what_it_has() -> None:
    late, other = a_machine(1), a_machine(2)
    fleet = a_fleet(late)
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.handle(events.ExecutorDoubted(late.address, is_doubtful=True))
    fleet.submit(a_request(2))
    fleet.settle()
    assert fleet.scheduler.num_waiting == 1
    fleet.join(other)
    fleet.settle()
    assert (fleet.requests_at(late), fleet.requests_at(other)) == (["r1"], ["r2"])


def test_request_begins_when_the_only_executor_is_no_longer_doubtful() -> None:
    machine = a_machine()
    fleet = a_fleet(machine)
    fleet.handle(events.ExecutorDoubted(machine.address, is_doubtful=True))
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.handle(events.ExecutorDoubted(machine.address, is_doubtful=False))
    assert RequestAssigned in kinds(fleet.settle())
    assert fleet.handle(events.ExecutorDoubted(machine.address, is_doubtful=False)) == []


# -- executors that are expected back --------------------------------------------------------------


def test_request_ends_when_the_executor_that_could_run_it_does_not_come_back() -> None:
    large, small = a_machine(1), a_machine(2, max_model_len=3)
    fleet = a_fleet(large, small)
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.lose(large)
    assert fleet.scheduler.num_waiting == fleet.scheduler.num_unfitting == 1
    fleet.pass_time(RETURN_S - 1)
    assert fleet.finished == {}
    fleet.pass_time(2)
    error = fleet.finished["r1"].error
    assert error is not None
    assert "none that could came back within 30 s" in error[1]
    assert fleet.wakes_at_ns is None


def test_request_goes_on_when_the_executor_that_can_run_it_comes_back_in_time() -> None:
    large, small = a_machine(1), a_machine(2, max_model_len=3)
    fleet = a_fleet(large, small)
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.lose(large)
    fleet.pass_time(RETURN_S - 1)
    large.restart()
    fleet.join(large)
    fleet.pass_time(2)
    fleet.run()
    assert fleet.tokens == {1: tokens_of(1)}


def test_request_waits_for_ever_when_no_executor_is_there() -> None:
    machine = a_machine()
    fleet = a_fleet(machine)
    fleet.submit(a_request(1))
    fleet.lose(machine)
    fleet.pass_time(100 * RETURN_S)
    assert fleet.scheduler.num_waiting == 1
    assert fleet.wakes_at_ns is None
    fleet.join(machine)
    fleet.run()
    assert fleet.tokens == {1: tokens_of(1)}


# -- quarantine ------------------------------------------------------------------------------------


def a_quarantine() -> tuple[PureFleet, list[Machine]]:
    """Two requests of which executors may have died; another executor is there."""
    machines = [a_machine(number) for number in (1, 2)]
    fleet = a_fleet(machines[0], max_executor_losses=1)
    fleet.submit(a_request(1), a_request(2))
    fleet.settle()
    fleet.lose(machines[0])
    assert len(fleet.effects_of(RequestQuarantined)) == 2
    return fleet, machines


def test_suspects_run_alone_and_are_acquitted_when_nothing_happens() -> None:
    fleet, machines = a_quarantine()
    fleet.join(machines[1])
    assigned = fleet.effects_of(RequestAssigned)[-1]
    assert assigned.assignment.why is AssignedFor.TRIED_ALONE
    assert fleet.requests_at(machines[1]) == ["r1", "r2"]
    fleet.run()
    reasons = [each.reason for each in fleet.effects_of(RequestAcquitted)]
    assert reasons == [AcquittalReason.CAME_THROUGH] * 2
    assert fleet.tokens == {1: tokens_of(1), 2: tokens_of(2)}


def test_suspect_is_called_back_when_its_executor_becomes_the_last_one() -> None:
    fleet, machines = a_quarantine()
    third = a_machine(3)
    fleet.join(machines[1])
    fleet.join(third)
    (trial,) = [machine for machine in (machines[1], third) if fleet.requests_at(machine)]
    (other,) = [machine for machine in (machines[1], third) if machine is not trial]
    fleet.now_ns += MS

    found = fleet.lose(other)

    moved = [each for each in found if isinstance(each, RequestMoved)]
    assert [(each.request.request_id, each.reason) for each in moved] == [
        ("r1", MoveReason.LAST_EXECUTOR),
        ("r2", MoveReason.LAST_EXECUTOR),
    ]
    assert fleet.requests_at(trial) == []
    assert fleet.scheduler.num_quarantined == 2
    fleet.pass_time(RETURN_NS / 1e9 + 1)
    fleet.run()
    assert fleet.tokens == {1: tokens_of(1), 2: tokens_of(2)}


def test_others_run_on_when_a_suspect_turns_out_to_kill_executors() -> None:
    fleet, machines = a_quarantine()
    fleet.join(machines[1])
    fleet.settle()

    found = fleet.lose(machines[1])

    order = [RequestBlamed, RequestAcquitted, RequestFinished]
    assert [kind for kind in kinds(found) if kind in order] == order
    (acquitted,) = fleet.effects_of(RequestAcquitted)
    assert (acquitted.request.request_id, acquitted.reason) == (
        "r2",
        AcquittalReason.ANOTHER_FAILED,
    )
    error = fleet.finished["r1"].error
    assert error is not None
    assert error[0] == "EXECUTOR_LOST_REPEATEDLY"
    assert (fleet.scheduler.num_quarantined, fleet.scheduler.num_queued) == (0, 1)
    fleet.join(a_machine(3))
    fleet.run()
    assert fleet.tokens == {2: tokens_of(2)}


def test_suspect_that_waits_is_released_when_another_turns_out_to_kill_executors() -> None:
    every = frozenset(Feature)
    first, second = a_machine(1, features=every), a_machine(2, features=frozenset())
    fleet = a_fleet(first, max_executor_losses=1)
    fleet.submit(a_request(1), a_request(2, num_prompt_logprobs=1))
    fleet.settle()
    fleet.lose(first)
    fleet.join(second)
    fleet.settle()
    assert fleet.requests_at(second) == ["r1"]  # the other one does not fit there

    fleet.lose(second)

    assert fleet.finished.keys() == {"r1"}
    assert (fleet.scheduler.num_quarantined, fleet.scheduler.num_queued) == (0, 1)
    fleet.join(a_machine(3, features=every))
    fleet.run()
    assert fleet.tokens == {2: tokens_of(2)}


@pytest.mark.parametrize("answers", [False, True])
def test_silent_life_that_comes_back_is_lost_anew_when_it_has_answered(answers: bool) -> None:
    machine = a_machine()
    fleet = a_fleet(machine)
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.lose(machine, LossCause.SILENT)
    (gone,) = fleet.effects_of(ExecutorGone)
    fleet.join(machine, last_step_id=gone.last_step_id)
    fleet.settle()
    if answers:
        fleet.answer(machine)
    fleet.lose(machine, LossCause.SILENT)
    assert bool(fleet.effects_of(RequestQuarantined)) is answers


def test_suspect_ends_at_its_deadline_when_no_executor_is_there() -> None:
    fleet = a_fleet(a_machine(), queue_policy="deadline", max_executor_losses=1)
    fleet.submit(a_request(1, SchedulingParams(deadline_ns=MS)), a_request(2))
    fleet.settle()
    fleet.lose(fleet.machines["executor:1"])
    assert fleet.scheduler.num_quarantined == 2
    fleet.pass_time(0.01)
    assert fleet.finished["r1"].error is not None
    assert fleet.finished["r1"].error[0] == "DEADLINE_UNREACHABLE"
    assert fleet.scheduler.num_waiting == 1


# -- requests that fail on an executor -------------------------------------------------------------


def a_failed_row() -> tuple[PureFleet, Machine, Machine]:
    """The row of a request fails on the first executor; the second is doubtful."""
    sick, late = a_machine(1), a_machine(2)
    sick.is_not_a_number = True
    fleet = a_fleet(sick)
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.join(late)
    fleet.handle(events.ExecutorDoubted(late.address, is_doubtful=True))
    return fleet, sick, late


def test_request_that_failed_is_retried_where_it_did_not_fail() -> None:
    fleet, sick, late = a_failed_row()
    fleet.handle(events.ExecutorDoubted(late.address, is_doubtful=False))
    found = fleet.answer(sick) + fleet.settle()
    moved = next(effect for effect in found if isinstance(effect, RequestMoved))
    assigned = next(effect for effect in found if isinstance(effect, RequestAssigned))
    assert found.index(moved) < found.index(assigned)
    assert moved.reason is MoveReason.FAILED_THERE
    assert (assigned.address, assigned.assignment.why) == (late.address, AssignedFor.RETRIED)
    fleet.run()
    assert fleet.tokens == {1: tokens_of(1)}


def test_request_that_failed_waits_for_an_executor_that_is_doubtful() -> None:
    fleet, sick, late = a_failed_row()
    fleet.answer(sick)
    fleet.settle()
    assert fleet.scheduler.num_queued == 1
    fleet.handle(events.ExecutorDoubted(late.address, is_doubtful=False))
    assert RequestAssigned in kinds(fleet.settle())
    assert fleet.requests_at(late) == ["r1"]
    fleet.run()
    assert fleet.tokens == {1: tokens_of(1)}


def test_request_that_failed_does_not_wait_for_the_executor_where_it_did() -> None:
    fleet, sick, busy = a_failed_row()
    fleet.handle(events.ExecutorDoubted(busy.address, is_doubtful=False))
    fleet.handle(events.ExecutorDoubted(sick.address, is_doubtful=True))
    fleet.submit(a_request(2), a_request(3))
    fleet.settle()
    fleet.handle(events.ExecutorDoubted(sick.address, is_doubtful=False))

    fleet.answer(sick)
    fleet.answer(sick)
    fleet.settle()  # the first executor is idle, and would be sooner to compute it
    fleet.answer(busy)

    assert fleet.requests_at(busy) == ["r1", "r2", "r3"]


def test_request_that_waits_to_be_retried_ends_when_it_is_aborted() -> None:
    fleet, sick, _ = a_failed_row()
    fleet.answer(sick)
    assert kinds(fleet.abort("r1"))[0] is RequestFinished
    assert fleet.scheduler.num_waiting == 0


def test_nobody_is_blamed_when_batches_were_too_large_to_be_sent() -> None:
    fleet, machine = a_fleet(), a_machine()
    fleet.join(machine, num_credits=1)
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.join(a_machine(2))
    for _ in range(2):
        plan, _ = fleet.held[machine.address].popleft()
        outcome = StepOutcome(plan.step_id, StepStatus.REFUSED)
        fleet.handle(events.StepCompleted(machine.address, outcome, was_sent=False))
        fleet.settle()
    assert fleet.effects_of(RequestMoved) == []
    assert fleet.requests_at(machine) == ["r1"]


def test_executor_that_fails_takes_no_more_suspects_than_it_has_rows() -> None:
    machine = a_machine()
    fleet = a_fleet(machine)
    machine.fails, machine.sick_every = True, 2
    engine, num_rows = fleet.executor(machine).engine, machine.config.max_num_seqs
    most = 0
    for number in range(1, 61):
        if fleet.scheduler.num_queued < 12:
            fleet.submit(a_request(number))
        fleet.settle()
        fleet.answer(machine)
        most = max(most, engine.num_unfinished)
    assert num_rows < most <= 2 * num_rows
    machine.fails = False
    fleet.run()


# -- preempted requests ----------------------------------------------------------------------------


def a_preemption() -> tuple[PureFleet, Machine, Machine]:
    """The first executor lacks blocks for r2, and goes on with r1; the second one is idle."""
    full, idle = a_machine(1, num_device_blocks=8), a_machine(2)
    fleet = a_fleet(full)
    fleet.submit(a_request(1, max_tokens=24), a_request(2, max_tokens=24))
    fleet.settle()
    for _ in range(24):
        if fleet.executor(full).engine.preempted_request_ids:
            break
        fleet.answer(full)
    fleet.answer(full)  # the last step that computes r2
    assert [r.request_id for r in fleet.executor(full).engine.movable_requests] == ["r2"]
    fleet.join(idle)
    fleet.settle()
    return fleet, full, idle


@pytest.mark.parametrize(("token_ns", "patience_ms"), [(0, 10), (MS, 17)])
def test_preempted_request_moves_to_an_idle_executor_when_it_has_waited_as_long_as_it_computes(
    token_ns: int, patience_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "recompute_ns", lambda _, num_tokens: num_tokens * token_ns)
    fleet, full, idle = a_preemption()
    fleet.now_ns = patience_ms * MS - 1
    fleet.answer(full)
    fleet.settle()
    assert fleet.requests_at(full) == ["r1", "r2"]

    fleet.now_ns += 1
    fleet.answer(full)

    (moved,) = fleet.effects_of(RequestMoved)
    assert (moved.request.request_id, moved.address) == ("r2", full.address)
    assert moved.reason is MoveReason.BEGINS_SOONER_ELSEWHERE
    assert (fleet.requests_at(full), fleet.requests_at(idle)) == (["r1"], ["r2"])
    fleet.run()
    assert fleet.tokens == {1: tokens_of(1, 24), 2: tokens_of(2, 24)}


def test_preempted_request_moves_when_nothing_happens_where_it_waits() -> None:
    fleet, full, idle = a_preemption()
    fleet.pass_time(0.009)
    assert fleet.requests_at(full) == ["r1", "r2"]
    fleet.pass_time(0.002)
    assert (fleet.requests_at(full), fleet.requests_at(idle)) == (["r1"], ["r2"])


def test_preempted_request_stays_when_no_other_executor_has_room_for_it() -> None:
    fleet, full, _ = a_preemption()
    fleet.handle(events.ExecutorDoubted("executor:2", is_doubtful=True))
    fleet.join(a_machine(3, num_device_blocks=4))
    fleet.pass_time(1)
    fleet.answer(full)
    fleet.settle()
    assert fleet.requests_at(full) == ["r1", "r2"]
    assert fleet.wakes_at_ns is None
    fleet.run()
    assert fleet.tokens == {1: tokens_of(1, 24), 2: tokens_of(2, 24)}


# -- time ------------------------------------------------------------------------------------------


def test_all_overdue_requests_end_when_there_is_no_step_to_end_them_in() -> None:
    fleet = a_fleet(a_machine(), queue_policy="deadline")
    num_requests = 3 * MAX_REFUSALS + 1
    assert num_requests <= VOCAB_SIZE
    for number in range(num_requests):
        fleet.submit(a_request(number, SchedulingParams(deadline_ns=-1)))
    fleet.pass_time(0.1)
    assert len(fleet.finished) == num_requests
    assert fleet.scheduler.num_waiting == 0
    assert fleet.wakes_at_ns is None


def test_next_request_begins_when_the_one_before_it_ended_before_its_first_step() -> None:
    fleet = a_fleet(a_machine(max_num_seqs=1), queue_policy="deadline")
    fleet.submit(a_request(1, SchedulingParams(deadline_ns=MS)), a_request(2))
    fleet.now_ns = 2 * MS
    fleet.run()
    assert fleet.finished["r1"].error is not None
    assert fleet.tokens == {2: tokens_of(2)}


def test_waiting_request_ends_soon_after_its_deadline() -> None:
    machine = a_machine(max_num_seqs=1)
    fleet = a_fleet(machine, queue_policy="deadline")
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.submit(a_request(2, SchedulingParams(deadline_ns=50 * MS)))
    fleet.settle()
    assert fleet.wakes_at_ns is not None
    assert 50 * MS <= fleet.wakes_at_ns <= 60 * MS
    fleet.pass_time(0.06)
    assert fleet.effects_of(RequestFinished)[-1].request.request_id == "r2"
    assert fleet.requests_at(machine) == ["r1"]


def test_nobody_asks_to_be_woken_when_there_is_nothing_to_do() -> None:
    fleet = a_fleet(a_machine(1), a_machine(2))
    fleet.submit(*map(a_request, range(1, 9)))
    fleet.run()
    assert fleet.wakes_at_ns is None
    assert fleet.handle(events.Tick()) == []
    assert fleet.handle(events.Tick(looks_everywhere=True)) == []


def test_step_is_sent_when_its_wake_up_was_lost_and_the_driver_looks_everywhere() -> None:
    fleet = a_fleet(a_machine())
    fleet.settle()
    fleet.submit(a_request(1))
    assert SendStep in kinds(fleet.handle(events.Tick(looks_everywhere=True)))


def test_aborted_request_ends_once_wherever_it_is() -> None:
    fleet = a_fleet(a_machine(max_num_seqs=1))
    fleet.submit(a_request(1), a_request(2))
    fleet.settle()
    fleet.abort("r2")
    fleet.abort("r1")
    fleet.run()
    assert [fleet.finished[name].finish_reason for name in ("r1", "r2")] == [
        FinishReason.ABORTED,
        FinishReason.ABORTED,
    ]
    assert fleet.abort("r1") == []
    assert fleet.scheduler.executors["executor:1"].engine.num_free_blocks == (
        CONFIG.num_device_blocks
    )


# -- tenants ---------------------------------------------------------------------------------------


def order_of_tenants(fleet: PureFleet, tenants: str) -> str:
    """Tenants in the order in which their requests, submitted as `tenants`, begin one by one."""
    fleet.join(a_machine(max_num_seqs=1))
    for number, tenant in enumerate(tenants, 1):
        fleet.submit(a_request(number, SchedulingParams(tenant=tenant)))
    fleet.run()
    return "".join(each.request.scheduling.tenant for each in fleet.effects_of(RequestAssigned))


def test_tenant_that_got_tokens_goes_behind_another() -> None:
    assert order_of_tenants(a_fleet(queue_policy="fair"), "aaabbb") == "ababab"


def test_tenant_begins_more_often_when_its_weight_is_larger() -> None:
    fleet = a_fleet(queue_policy="fair")
    fleet.handle(events.TenantsWeighed({"b": 2.0}))
    assert order_of_tenants(fleet, "aaabbb") == "abbaba"


# -- withdrawn executors ---------------------------------------------------------------------------


def test_waiting_request_begins_when_a_withdrawn_executor_is_reinstated() -> None:
    sick, well = a_machine(1), a_machine(2)
    sick.is_not_a_number = True
    fleet = a_fleet(sick, well)
    fleet.submit(*map(a_request, range(1, 13)))
    fleet.run()
    (gone,) = fleet.effects_of(ExecutorGone)
    assert (gone.address, gone.cause) == (sick.address, LossCause.WITHDRAWN)
    sick.is_not_a_number = False
    fleet.join(sick, last_step_id=gone.last_step_id)
    assert fleet.executor(sick).is_withdrawn
    fleet.handle(events.ExecutorDoubted(well.address, is_doubtful=True))
    fleet.submit(a_request(20))
    assert fleet.scheduler.num_waiting == 1

    fleet.run()

    changes = [each.change for each in fleet.effects_of(ExecutorHealthChanged)]
    assert changes[-1] is HealthChange.REINSTATED
    assert fleet.effects_of(RequestAssigned)[-1].address == sick.address
    assert fleet.tokens[20] == tokens_of(20)
