"""An executor that never compiles a grammar: its row is asked again, later and later."""

from __future__ import annotations

from scheduler_service.scheduler.effects import SendStep
from scheduler_service.scheduler.values.config import Feature
from scheduler_service.scheduler.values.sampling_params import Grammar
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.machines import Machine
from tests.support.core.pure_fleet import PureFleet, a_request

SCHEMA = Grammar("json_schema", ("{}",))


def a_fleet() -> tuple[PureFleet, Machine]:
    """One executor has a request with a grammar."""
    fleet = PureFleet()
    machine = Machine("executor:1", eos_token_ids=frozenset({0}), features=frozenset(Feature))
    fleet.join(machine)
    fleet.submit(a_request(1, grammar=SCHEMA))
    fleet.settle()
    return fleet, machine


def not_compiled(result: pb.StepResult) -> None:
    """The first row of a step, which is of the request with a grammar, gets no token."""
    num_rows = len(result.sampled_token_ids) // 4
    result.row_statuses = bytes([pb.ROW_STATUS_NOT_SAMPLED, *[pb.ROW_STATUS_OK] * (num_rows - 1)])
    result.sampled_token_ids = b"\xff" * 4 + result.sampled_token_ids[4:]


def test_newcomer_is_served_at_once_when_the_engine_waits_to_ask_again() -> None:
    fleet, machine = a_fleet()
    fleet.answer(machine, not_compiled)
    assert fleet.settle() == []
    # No time passes: the row would never be asked alone again.
    fleet.submit(a_request(2, max_tokens=1))
    fleet.settle()
    fleet.answer(machine, not_compiled)
    assert fleet.finished.keys() == {"r2"}
    assert len(fleet.effects_of(SendStep)) == 2


def test_row_is_asked_again_when_its_time_has_come() -> None:
    fleet, machine = a_fleet()
    fleet.answer(machine, not_compiled)
    asks_at_ns = fleet.executor(machine).engine.ask_again_at_ns
    assert asks_at_ns is not None
    assert fleet.wakes_at_ns == asks_at_ns > fleet.now_ns

    fleet.now_ns = asks_at_ns - 1
    assert fleet.settle() == []
    fleet.now_ns = asks_at_ns
    fleet.settle()
    assert len(fleet.effects_of(SendStep)) == 2


def test_nothing_is_asked_again_when_the_request_was_aborted() -> None:
    fleet, machine = a_fleet()
    fleet.answer(machine, not_compiled)
    fleet.abort("r1")
    fleet.settle()
    assert fleet.wakes_at_ns is None


def test_request_ends_when_its_grammar_is_never_compiled() -> None:
    fleet, machine = a_fleet()
    while not fleet.finished:
        fleet.answer(machine, not_compiled)
        fleet.pass_time(2)
    assert fleet.finished["r1"].error == (
        "ROW_FAILED",
        "the executor has not compiled its grammar in 60 s",
    )
    assert len(fleet.effects_of(SendStep)) < 40
    assert not fleet.executor(machine).engine.num_running
