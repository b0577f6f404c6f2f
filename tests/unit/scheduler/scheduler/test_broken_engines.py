"""An engine whose call raises, by a fault made here: its requests go on elsewhere, or end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.scheduler import (
    FAULT_MESSAGE,
    FAULT_REASON,
    DeliverTokens,
    EngineFailed,
    ExecutorGone,
    LossCause,
    RequestFinished,
    RequestSubmitted,
)
from scheduler_service.scheduler.engine import Engine, RowColumns, SequenceEndings
from scheduler_service.scheduler.engine.blocks import PrefixCache
from scheduler_service.scheduler.engine.outcomes import MAX_FRUITLESS_LOSSES, Results
from scheduler_service.scheduler.engine.planning import Room
from scheduler_service.scheduler.values import (
    BeamParams,
    FleetConfig,
    Request,
    StepEvents,
    StepOutcome,
    StepPlan,
)
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.machines import Machine
from tests.support.core.pure_fleet import Broken, PureFleet, a_request, tokens_of

# What `apply` calls on its way: first of all, when prompt logprobs and full blocks are taken, and
# when it is about to append tokens.
TAKE, PUBLISH, CHARGE = (
    (Results, "take"),
    (PrefixCache, "publish_rows"),
    (Results, "charge_tenant"),
)

_MAX_ROUNDS = 100


def a_machine(address: str = "executor:1") -> Machine:
    return Machine(address, max_num_seqs=8)


def a_fleet(*requests: Request) -> tuple[PureFleet, Machine]:
    """Fleet in which one executor runs all `requests`; tenants pay per token."""
    fleet, machine = PureFleet(FleetConfig(queue_policy="fair")), a_machine()
    fleet.join(machine)
    fleet.submit(*requests)
    return fleet, machine


def break_one(fleet: PureFleet) -> ExecutorGone:
    """Lets executors answer until another one is gone."""
    num_gone = len(fleet.effects_of(ExecutorGone))
    for _ in range(_MAX_ROUNDS):
        fleet.settle()
        for address in [address for address, held in fleet.held.items() if held]:
            if fleet.held.get(address):
                fleet.answer(fleet.machines[address])
        if len(fleet.effects_of(ExecutorGone)) > num_gone:
            return fleet.effects_of(ExecutorGone)[-1]
    raise AssertionError("no executor is gone")


def finish_elsewhere(fleet: PureFleet) -> None:
    """Another executor joins, gets all requests, and brings them to their ends."""
    fleet.join(a_machine("executor:2"))
    fleet.run()


def raise_after_take(monkeypatch: pytest.MonkeyPatch, step_id: int) -> None:
    """Makes `apply` raise, once, when it has taken all that the result of a step brought."""
    original = Results.take

    def take(results: Results, plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
        original(results, plan, outcome, events)
        if plan.step_id == step_id:
            monkeypatch.undo()
            raise AssertionError("after all was taken")

    monkeypatch.setattr(Results, "take", take)


# -- what the scheduler says -----------------------------------------------------------------------


def test_executor_is_removed_blameless_when_no_step_can_be_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = Broken(monkeypatch, RowColumns, "plan_work")
    fleet, machine = a_fleet(a_request(1))

    found = fleet.settle()

    failed, gone = (e for e in found if isinstance(e, EngineFailed | ExecutorGone))
    assert failed == EngineFailed(machine.address, "plan_step", broken.error)
    assert isinstance(gone, ExecutorGone)
    assert (gone.cause, gone.why) == (
        LossCause.BLAMELESS,
        "the scheduler's engine for this executor failed",
    )
    assert [request.is_finished for request in gone.requests] == [False]
    assert fleet.scheduler.executors == {}
    finish_elsewhere(fleet)
    assert fleet.tokens == {1: tokens_of(1)}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("plan_step", lambda fleet: fleet.answer(fleet.machines["executor:1"])),
        ("apply", lambda fleet: fleet.answer(fleet.machines["executor:1"])),
        ("abort", lambda fleet: fleet.abort("r1")),
        ("take_ended", lambda fleet: fleet.abort("r1")),
    ],
)
def test_executor_is_removed_when_any_call_of_its_engine_raises(
    name: str, call: Callable[[PureFleet], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, _ = a_fleet(a_request(1))
    fleet.settle()
    Broken(monkeypatch, Engine, name)

    call(fleet)

    assert [failed.call for failed in fleet.effects_of(EngineFailed)] == [name]
    assert fleet.scheduler.executors == {}
    finish_elsewhere(fleet)
    assert fleet.scheduler.locations == {}


def test_tokens_are_delivered_when_the_next_plan_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Broken(monkeypatch, RowColumns, "plan_work").at_call = 3
    fleet, machine = a_fleet(a_request(1))
    fleet.settle()

    found = fleet.answer(machine)

    assert [type(effect) for effect in found[:3]] == [EngineFailed, DeliverTokens, ExecutorGone]
    (request,) = found[2].requests  # type: ignore[union-attr]
    assert len(fleet.tokens[1]) == request.sequence.num_output_tokens == 1


# -- what becomes of requests ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "at_call"),
    [*((part, call) for part in (TAKE, CHARGE) for call in (1, 4, 7)), (PUBLISH, 1), (PUBLISH, 2)],
)
def test_clients_get_every_token_once_when_apply_raises_half_way(
    monkeypatch: pytest.MonkeyPatch, part: tuple[type, str], at_call: int
) -> None:
    Broken(monkeypatch, *part).at_call = at_call
    check_tokens_after_a_break()


def test_clients_get_every_token_once_when_apply_raises_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raise_after_take(monkeypatch, step_id=6)
    check_tokens_after_a_break()


def check_tokens_after_a_break() -> None:
    numbers = (1, 2, 3)
    fleet, _ = a_fleet(*map(a_request, numbers))

    gone = break_one(fleet)

    assert len(gone.requests) == 3
    assert [failed.call for failed in fleet.effects_of(EngineFailed)] == ["apply"]
    finish_elsewhere(fleet)
    assert fleet.tokens == {number: tokens_of(number) for number in numbers}


@pytest.mark.parametrize("when", ["before", "half way", "after"])
def test_clients_get_prompt_logprobs_once_when_apply_raises(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if when == "after":
        raise_after_take(monkeypatch, step_id=1)
    else:
        Broken(monkeypatch, *(TAKE if when == "before" else CHARGE))
    fleet, _ = a_fleet(a_request(1, num_prompt_logprobs=1))

    break_one(fleet)
    finish_elsewhere(fleet)

    assert fleet.effects_of(EngineFailed)
    assert fleet.prompt_positions == {1: [1, 2]}


@pytest.mark.parametrize(
    ("part", "name"),
    [(RowColumns, "plan_work"), (Room, "find_blocker"), (Results, "take")],
)
def test_request_ends_when_every_engine_fails_with_it(
    part: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = PureFleet()
    fleet.handle(RequestSubmitted(a_request(1)))
    num_engines = 0
    while not fleet.finished:
        num_engines += 1
        assert num_engines <= MAX_FRUITLESS_LOSSES
        with monkeypatch.context() as context:
            Broken(context, part, name)
            fleet.join(a_machine(f"executor:{num_engines}"))
            break_one(fleet)

    assert num_engines == MAX_FRUITLESS_LOSSES
    assert fleet.finished["r1"].error == (FAULT_REASON, FAULT_MESSAGE)


@pytest.mark.parametrize("params", [{"beam": BeamParams(2)}, {"n": 1, "best_of": 2}])
def test_request_ends_when_apply_raises_beyond_its_tokens(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, object]
) -> None:
    Broken(monkeypatch, *CHARGE).at_call = 3
    fleet, _ = a_fleet(a_request(1), a_request(2, **params))  # type: ignore[arg-type]

    break_one(fleet)

    assert {name: request.error for name, request in fleet.finished.items()} == {
        "r2": (FAULT_REASON, FAULT_MESSAGE)
    }
    finish_elsewhere(fleet)
    assert fleet.tokens[1] == tokens_of(1)


@pytest.mark.parametrize("calls", [["apply"], ["apply", "take_ended"]])
def test_request_ends_with_an_error_when_its_end_was_lost(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    original = SequenceEndings.finish_if_stopped

    def finish_if_stopped(endings: SequenceEndings, sequence: Any) -> None:  # noqa: ANN401
        original(endings, sequence)
        if "take_ended" in calls:
            Broken(monkeypatch, Engine, "take_ended")
        raise AssertionError("after the end")

    monkeypatch.setattr(SequenceEndings, "finish_if_stopped", finish_if_stopped)
    fleet, _ = a_fleet(a_request(1, max_tokens=3))

    break_one(fleet)

    assert [failed.call for failed in fleet.effects_of(EngineFailed)] == calls
    assert fleet.finished["r1"].error == (FAULT_REASON, FAULT_MESSAGE)
    assert fleet.effects_of(RequestFinished)[0].request is fleet.finished["r1"]
    assert len(fleet.tokens[1]) == 2


def test_requests_end_with_an_error_when_the_evacuation_fails_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Broken(monkeypatch, RowColumns, "plan_work")
    Broken(monkeypatch, Engine, "evacuate")
    fleet, _ = a_fleet(a_request(1))

    fleet.settle()

    assert [failed.call for failed in fleet.effects_of(EngineFailed)] == ["plan_step", "evacuate"]
    assert fleet.finished["r1"].error == (FAULT_REASON, FAULT_MESSAGE)
    assert fleet.scheduler.locations == {}


def test_executor_is_lost_when_a_result_breaks_the_contract() -> None:
    fleet, machine = a_fleet(a_request(1))
    fleet.settle()

    def another_step(result: pb.StepResult) -> None:
        result.step_id += 1

    fleet.answer(machine, another_step)

    (gone,) = fleet.effects_of(ExecutorGone)
    assert gone.cause is LossCause.DIED
    assert not fleet.effects_of(EngineFailed)
    finish_elsewhere(fleet)
    assert fleet.tokens == {1: tokens_of(1)}
