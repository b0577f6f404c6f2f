"""A preempted request waits at its executor for a while, and then begins at another one."""

from __future__ import annotations

from scheduler_service.scheduler import events
from scheduler_service.scheduler.effects import MoveReason, RequestMoved
from tests.unit.scheduler.scheduler.routed_fleet import MS, ONE_ROW, RoutedFleet


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


def test_preempted_request_moves_when_it_has_waited_as_long_as_it_takes_to_compute_it() -> None:
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


def test_preempted_request_does_not_move_while_a_step_in_flight_concerns_it() -> None:
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


def test_preempted_request_does_not_move_when_a_waiting_one_goes_before_it() -> None:
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


def test_preempted_request_gets_nothing_of_a_step_in_flight_when_it_was_aborted() -> None:
    fleet = preempted_at_first(num_credits=2)
    (victim,) = fleet.engine(0).placement.preempted
    assert not fleet.engine(0).movable_requests  # a step in flight samples for it
    num_tokens = len(fleet.tokens[victim.client_key])
    fleet.handle(events.RequestAborted("victim"))
    for _ in range(3):
        fleet.answer_at(0)
    assert len(fleet.tokens[victim.client_key]) == num_tokens
    assert victim.sequences[0].num_output_tokens == num_tokens
