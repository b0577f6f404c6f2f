"""Requests that fail, are suspected or preempted at one executor: where they go on."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler import (
    RETURN_NS,
    AcquittalReason,
    ExecutorGone,
    LossCause,
    MoveReason,
    RequestAcquitted,
    RequestAssigned,
    RequestBlamed,
    RequestFinished,
    RequestMoved,
    RequestQuarantined,
    events,
)
from scheduler_service.scheduler.values import AssignedFor, Feature, SchedulingParams
from tests.support.core.machines import Machine
from tests.support.core.pure_fleet import (
    PureFleet,
    a_fleet,
    a_machine,
    a_request,
    kinds,
    tokens_of,
)
from tests.unit.scheduler.scheduler.routed_fleet import MS, ONE_ROW, RoutedFleet

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


def test_suspect_is_recalled_from_the_last_executor() -> None:
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


def test_others_run_on_when_a_suspect_is_blamed() -> None:
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


def test_waiting_suspect_is_released_when_another_is_blamed() -> None:
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
def test_silent_life_is_lost_anew_after_an_answer(answers: bool) -> None:
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


def test_failed_request_does_not_wait_for_the_same_executor() -> None:
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


def test_aborted_request_is_not_retried() -> None:
    fleet, sick, _ = a_failed_row()
    fleet.answer(sick)
    assert kinds(fleet.abort("r1"))[0] is RequestFinished
    assert fleet.scheduler.num_waiting == 0


def test_nobody_is_blamed_for_batches_too_large_to_send() -> None:
    fleet, machine = a_fleet(), a_machine()
    fleet.join(machine, num_credits=1)
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.join(a_machine(2))
    for _ in range(2):
        fleet.refuse(machine)
        fleet.settle()
    assert fleet.effects_of(RequestMoved) == []
    assert fleet.requests_at(machine) == ["r1"]


def test_failing_executor_takes_limited_suspects() -> None:
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


def test_preempted_request_moves_when_nothing_happens_where_it_waits() -> None:
    fleet, full, idle = a_preemption()
    fleet.pass_time(0.009)
    assert fleet.requests_at(full) == ["r1", "r2"]
    fleet.pass_time(0.002)
    assert (fleet.requests_at(full), fleet.requests_at(idle)) == (["r1"], ["r2"])


def test_preempted_request_stays_without_room_elsewhere() -> None:
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


def moves(fleet: RoutedFleet) -> list[str]:
    """Names of requests that were taken back to begin elsewhere."""
    moved = fleet.effects_of(RequestMoved)
    assert all(each.reason is MoveReason.BEGINS_SOONER_ELSEWHERE for each in moved)
    return [each.request.request_id for each in moved]


def look(fleet: RoutedFleet) -> list[tuple[str, int]]:
    """Ticks every executor; returns newly begun requests."""
    fleet.handle(events.Tick(looks_everywhere=True))
    return fleet.begun()


def preempted_at_first(num_credits: int = 1) -> RoutedFleet:
    """`victim` was preempted at executor 0 by an urgent request; executor 1 is about to be free."""
    fleet = RoutedFleet(ONE_ROW, ONE_ROW, policy="priority", num_credits=num_credits)
    fleet.compute(1, [5] * 40)
    fleet.doubt(1)
    fleet.push("victim", 20)
    assert fleet.begun() == [("victim", 0)]
    fleet.answer_at(0)
    fleet.push("urgent", priority=-1)
    fleet.answer_at(0)
    assert fleet.begun() == [("urgent", 0)]
    assert fleet.engine(0).preempted_request_ids == ["victim"]
    fleet.doubt(1, is_doubtful=False)
    return fleet


def test_preempted_request_moves_when_recomputing_is_sooner() -> None:
    fleet = preempted_at_first()
    fleet.now_ns += 9 * MS
    assert look(fleet) == []
    fleet.now_ns += 12 * MS  # 22 tokens, of a millisecond each
    assert look(fleet) == []
    fleet.now_ns += 2 * MS
    assert look(fleet) == [("victim", 1)]
    assert moves(fleet) == ["victim"]
    (moved,) = fleet.effects_of(RequestMoved)
    assert len(moved.request.sequence.token_ids) == 22
    fleet.run()
    assert len(fleet.tokens[2]) == 50


def test_preempted_request_stays_while_a_step_concerns_it() -> None:
    fleet = preempted_at_first(num_credits=2)
    fleet.now_ns += 1000 * MS
    assert look(fleet) == []
    fleet.answer_at(0)
    fleet.answer_at(0)
    assert fleet.begun() == [("victim", 1)]
    fleet.run()
    assert len(fleet.tokens[2]) == 50


def two_preempted() -> RoutedFleet:
    """`urgent` and `usual` were preempted at one executor; `first` runs at the other."""
    fleet = RoutedFleet(ONE_ROW, ONE_ROW, policy="priority")
    fleet.push("first", priority=-5)
    fleet.push("usual")
    fleet.begun()
    fleet.step()
    fleet.push("urgent", priority=-3)
    fleet.step()
    fleet.push("most urgent", priority=-4)
    fleet.step()
    fleet.push("later", priority=1)
    fleet.step()
    fleet.now_ns += 50 * MS
    assert fleet.step() == []
    return fleet


def test_preempted_requests_begin_elsewhere_before_those_that_go_after_them() -> None:
    fleet = two_preempted()
    begun = []
    for ended in ("first", "urgent", "usual"):
        fleet.abort(ended)
        begun += [name for name, _ in fleet.step()]
    assert begun == ["urgent", "usual", "later"]
    assert moves(fleet) == ["urgent", "usual"]


def test_preempted_request_stays_when_a_waiting_one_goes_first() -> None:
    fleet = two_preempted()
    fleet.push("new", priority=-4)
    fleet.abort("first")
    assert [name for name, _ in fleet.step()] == ["new"]
    assert moves(fleet) == []


def test_preempted_request_does_not_move_at_once() -> None:
    fleet = two_preempted()
    fleet.now_ns -= 45 * MS
    fleet.abort("first")
    assert [name for name, _ in fleet.step()] == ["later"]
    assert moves(fleet) == []


def test_aborted_preempted_request_gets_no_more_tokens() -> None:
    fleet = preempted_at_first(num_credits=2)
    (victim,) = fleet.engine(0).placement.preempted
    assert not fleet.engine(0).movable_requests  # a step in flight samples for it
    num_tokens = len(fleet.tokens[victim.client_key])
    fleet.handle(events.RequestAborted("victim"))
    for _ in range(3):
        fleet.answer_at(0)
    assert len(fleet.tokens[victim.client_key]) == num_tokens
    assert victim.sequences[0].num_output_tokens == num_tokens
