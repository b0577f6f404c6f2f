"""Which effects follow from each event, and in which order."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler import (
    DeliverTokens,
    Effect,
    ExecutorGone,
    ExecutorServes,
    LossCause,
    MoveReason,
    RequestAssigned,
    RequestMoved,
    SendStep,
    WakeAt,
    events,
)
from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.engine.planning import MAX_REFUSALS
from scheduler_service.scheduler.values import Feature, FinishReason, Grammar, SchedulingParams
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.machines import CONFIG, VOCAB_SIZE, Machine
from tests.support.core.pure_fleet import (
    RETURN_S,
    Broken,
    PureFleet,
    a_fleet,
    a_machine,
    a_request,
    kinds,
    tokens_of,
)

MS = 1_000_000


# -- each event ------------------------------------------------------------------------------------


FIRST, SECOND = "executor:1", "executor:2"
JOIN_SECOND = events.ExecutorJoined(SECOND, 1, CONFIG, 2)


# Effects of the last of these events.
@pytest.mark.parametrize(
    ("each", "expected"),
    [
        ([JOIN_SECOND], []),
        ([JOIN_SECOND, events.ExecutorConnected(SECOND)], [ExecutorServes, WakeAt]),
        ([events.RequestSubmitted(a_request(2))], []),
        ([events.RequestAborted("r1")], [DeliverTokens, WakeAt]),
        ([events.RequestAborted("nobody's")], []),
        ([events.ExecutorDoubted(FIRST, is_doubtful=True)], []),
        ([events.ExecutorDraining(FIRST)], []),
        (
            [events.ExecutorDraining(FIRST), events.ExecutorDrainExpired(FIRST)],
            [RequestMoved, ExecutorGone, WakeAt],
        ),
        ([events.ExecutorDraining(FIRST), events.ExecutorUndrained(FIRST)], []),
        ([events.ExecutorLost(FIRST, LossCause.DIED, "why")], [ExecutorGone, WakeAt]),
        ([events.TenantsWeighed({"a": 2.0})], []),
    ],
)
def test_event_has_these_effects_when_one_executor_runs_one_request(
    each: list[events.Event], expected: list[type[Effect]]
) -> None:
    fleet = a_fleet(a_machine())
    fleet.submit(a_request(1))
    fleet.settle()
    for event in each:
        found = fleet.scheduler.handle(event, 0)
    assert kinds(found) == expected


def test_steps_are_sent_before_tokens_are_delivered() -> None:
    fleet = a_fleet(a_machine(1))
    fleet.submit(a_request(1))
    fleet.settle()
    fleet.join(a_machine(2))
    assert kinds(fleet.submit(a_request(2))) == []
    assert kinds(fleet.settle()) == [RequestAssigned, SendStep, SendStep]
    assert kinds(fleet.answer(fleet.machines[FIRST])) == [SendStep, DeliverTokens]


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
def test_event_of_an_unknown_executor_changes_nothing(
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


def test_nothing_changes_when_a_new_engine_fails(
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


# -- order -----------------------------------------------------------------------------------------


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
def test_steps_in_flight_never_exceed_credits(num_credits: int) -> None:
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


def test_requests_move_to_the_new_life_at_an_address() -> None:
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
    assert gone.why == "a new executor registered at this address"
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


def test_requests_of_a_lost_executor_keep_their_order() -> None:
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


def test_idle_executor_is_gone_at_once_when_it_drains() -> None:
    fleet = a_fleet(a_machine())
    fleet.settle()
    found = fleet.handle(events.ExecutorDraining("executor:1"))
    assert isinstance(found[0], ExecutorGone)


# -- doubt -----------------------------------------------------------------------------------------


def test_doubtful_executor_gets_no_new_requests() -> None:
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


# -- executors that are expected back --------------------------------------------------------------


def test_request_ends_when_its_only_executor_stays_away() -> None:
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
    assert "no suitable executor came back within 30 s" in error[1]
    assert fleet.wakes_at_ns is None


def test_request_goes_on_when_its_executor_returns() -> None:
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


# -- time ------------------------------------------------------------------------------------------


def test_overdue_requests_end_without_a_step() -> None:
    fleet = a_fleet(a_machine(), queue_policy="deadline")
    num_requests = 3 * MAX_REFUSALS + 1
    assert num_requests <= VOCAB_SIZE
    for number in range(num_requests):
        fleet.submit(a_request(number, SchedulingParams(deadline_ns=-1)))
    fleet.pass_time(0.1)
    assert len(fleet.finished) == num_requests
    assert fleet.scheduler.num_waiting == 0
    assert fleet.wakes_at_ns is None


def test_next_request_begins_when_one_ends_before_its_step() -> None:
    fleet = a_fleet(a_machine(max_num_seqs=1), queue_policy="deadline")
    fleet.submit(a_request(1, SchedulingParams(deadline_ns=MS)), a_request(2))
    fleet.now_ns = 2 * MS
    fleet.run()
    assert fleet.finished["r1"].error is not None
    assert fleet.tokens == {2: tokens_of(2)}


def test_nobody_asks_to_be_woken_when_idle() -> None:
    fleet = a_fleet(a_machine(1), a_machine(2))
    fleet.submit(*map(a_request, range(1, 9)))
    fleet.run()
    assert fleet.wakes_at_ns is None
    assert fleet.handle(events.Tick()) == []
    assert fleet.handle(events.Tick(looks_everywhere=True)) == []


def test_step_is_sent_after_a_lost_wake_up() -> None:
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


# -- rows that are asked again -----------------------------------------------------------------

SCHEMA = Grammar("json_schema", ("{}",))


def a_grammar() -> tuple[PureFleet, Machine]:
    """One executor has a request with a grammar."""
    fleet = PureFleet()
    machine = a_machine(eos_token_ids=frozenset({0}), features=frozenset(Feature))
    fleet.join(machine)
    fleet.submit(a_request(1, grammar=SCHEMA))
    fleet.settle()
    return fleet, machine


def not_compiled(result: pb.StepResult) -> None:
    """The first row of a step, which is of the request with a grammar, gets no token."""
    num_rows = len(result.sampled_token_ids) // 4
    result.row_statuses = bytes([pb.ROW_STATUS_NOT_SAMPLED, *[pb.ROW_STATUS_OK] * (num_rows - 1)])
    result.sampled_token_ids = b"\xff" * 4 + result.sampled_token_ids[4:]


def test_row_is_asked_again_when_its_time_has_come() -> None:
    fleet, machine = a_grammar()
    fleet.answer(machine, not_compiled)
    asks_at_ns = fleet.executor(machine).engine.ask_again_at_ns
    assert asks_at_ns is not None
    assert fleet.wakes_at_ns == asks_at_ns > fleet.now_ns

    fleet.now_ns = asks_at_ns - 1
    assert fleet.settle() == []
    fleet.now_ns = asks_at_ns
    fleet.settle()
    assert len(fleet.effects_of(SendStep)) == 2


def test_request_ends_when_its_grammar_is_never_compiled() -> None:
    fleet, machine = a_grammar()
    while not fleet.finished:
        fleet.answer(machine, not_compiled)
        fleet.pass_time(2)
    assert fleet.finished["r1"].error == (
        "ROW_FAILED",
        "the executor did not compile the grammar within 60 s",
    )
    assert len(fleet.effects_of(SendStep)) < 40
    assert not fleet.executor(machine).engine.num_running
