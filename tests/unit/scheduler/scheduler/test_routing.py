"""At which executor a request begins, why, and how long it waits for the best one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest

from scheduler_service.scheduler import events
from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.routing import MAX_PASSED, Choice, HostState, LeastLoaded, Prefixes
from scheduler_service.scheduler.values import AssignedFor, Assignment, Feature, Request
from scheduler_service.step_codec import decode_result
from tests.support.core.driver import make_config
from tests.unit.scheduler.engine.test_cost_of_a_step import num_lines
from tests.unit.scheduler.scheduler.routed_fleet import (
    LONG,
    MS,
    ONE_ROW,
    SYSTEM,
    TOKEN_NS,
    RoutedFleet,
    busy_holder,
    measured,
)


def test_request_avoids_a_holder_whose_load_costs_more() -> None:
    fleet = measured({}, {})
    fleet.compute(0, SYSTEM)
    with fleet.only(0):
        for number in range(4):
            fleet.push(f"running-{number}", [60 + number], max_tokens=100)
        fleet.begun()
    fleet.step()
    fleet.push("r1", [*SYSTEM, 50, 51])
    assert fleet.begun() == [("r1", 1)]


@pytest.mark.parametrize("slowness", [(1, 4), (4, 1)])
def test_request_goes_to_the_faster_executor_without_a_prefix(
    slowness: tuple[int, int],
) -> None:
    fleet = measured({}, {}, slowness=slowness)
    fleet.push("r1", SYSTEM)
    assert fleet.begun() == [("r1", slowness.index(1))]


def test_longest_prefix_wins_when_block_sizes_differ() -> None:
    fleet = measured({"block_size": 16}, {"block_size": 4})
    fleet.compute(0, SYSTEM)
    fleet.compute(1, SYSTEM[:28])
    fleet.push("r1", [*SYSTEM, 50, 51])
    fleet.push("r2", [*SYSTEM[:28], 50, 51])
    # 32 tokens at the first, and 28 at the second; then 16 and 28.
    assert dict(fleet.begun()) == {"r1": 0, "r2": 1}


def test_prefix_counts_when_it_is_in_the_host_pool() -> None:
    small = {"num_device_blocks": 30, "num_host_blocks": 64}
    fleet = measured(small, small)
    fleet.compute(1, SYSTEM)
    fleet.compute(1, [77] * 118)
    with fleet.only(0):
        asked = fleet.push("r1", [*SYSTEM, 50, 51])
        prefixes = fleet.engine(1).placement.blocks.prefixes
        prefixes.adopt(asked.sequence)
        assert prefixes.find(asked.sequence).host_blocks
    assert fleet.begun() == [("r1", 1)]


def test_request_goes_where_blank_blocks_avoid_an_eviction() -> None:
    fleet = measured({"num_device_blocks": 64}, {"num_device_blocks": 64})
    fleet.compute(0, [77] * 190)
    assert fleet.engine(0).pools[0].num_blank < 2
    fleet.push("r1", 150)
    assert fleet.begun() == [("r1", 1)]


def test_requests_that_arrive_together_meet_where_the_first_goes() -> None:
    fleet = measured({}, {}, {})
    for last in (50, 51):
        fleet.push(f"r{last}", [*SYSTEM, last])
    where = dict(fleet.begun())
    assert len(where) == 2
    assert len(set(where.values())) == 1


def test_requests_that_arrive_together_are_spread_when_nothing_is_cached() -> None:
    fleet = measured({}, {})
    for number in range(4):
        fleet.push(f"r{number}", [10 + number] * 30)
    numbers = [number for _, number in fleet.begun()]
    assert sorted(numbers) == [0, 0, 1, 1]


def test_family_has_the_same_home_in_each_fleet() -> None:
    homes = []
    for _ in range(2):
        fleet = measured({}, {}, {}, {})
        lives: list[int] = []
        for family in range(12):
            fleet.push(f"r{family}", [family + 1] * 24)
            ((name, number),) = fleet.begun()
            lives.append(number)
            fleet.abort(name)
            fleet.step_until_idle(number)
        homes.append(lives)
    assert homes[0] == homes[1]
    assert len(set(homes[0])) > 1


# -- waiting for a busy executor -------------------------------------------------------------------


def test_request_waits_no_longer_than_that_may_save() -> None:
    fleet = busy_holder()
    fleet.push("r1", [*LONG, 50])
    assert fleet.begun() == []
    assert fleet.wakes_at_ns is not None
    assert fleet.wakes_at_ns > 50 * TOKEN_NS
    fleet.now_ns = fleet.wakes_at_ns - 1
    assert fleet.begun() == []
    fleet.now_ns += 1
    assert fleet.begun() == [("r1", 1)]


def test_others_begin_before_a_request_that_waits_but_not_many() -> None:
    fleet = busy_holder()
    fleet.push("waits", [*LONG, 50])
    for number in range(MAX_PASSED + 2):
        fleet.push(f"r{number}", [60 + number])
    assert fleet.begun() == [(f"r{number}", 1) for number in range(MAX_PASSED)]
    fleet.answer_at(1)
    assert fleet.begun()[0] == ("waits", 1)


def test_urgent_request_does_not_wait_for_less_urgent_ones() -> None:
    fleet = busy_holder("priority")
    fleet.push("r1", [*LONG, 50])
    fleet.push("r2", [60], priority=1)
    assert fleet.begun() == []
    fleet.push("r3", [61], priority=-1)
    assert fleet.begun() == [("r3", 1)]


class Priced(LeastLoaded):
    """Executor 0 costs each request what `costs_ns` says, by its id, and any other 1000 ns."""

    def __init__(self, **costs_ns: float) -> None:
        self._costs_ns = costs_ns

    def rank(
        self, request: Request, states: Sequence[HostState], prefixes: Prefixes
    ) -> Iterator[Choice]:
        first_ns = self._costs_ns.get(request.request_id, 1000.0)
        choices = [Choice(s, 1000.0 if s.number else first_ns) for s in states]
        return iter(sorted(choices, key=lambda choice: (choice.cost_ns, choice.state.number)))


def first_is_busy(costs_ns: Mapping[str, float], **other: object) -> RoutedFleet:
    """Executor 0 computes a long prompt, in this step and the next."""
    fleet = RoutedFleet({"max_num_batched_tokens": 8}, other, router=Priced(**costs_ns))
    fleet.begin(0, [1] * 40)
    fleet.begun()
    return fleet


def hold_ends_ns(fleet: RoutedFleet) -> int | None:
    """Wake-up time in ns at which a hold ends, slightly late."""
    return None if fleet.wakes_at_ns is None else fleet.wakes_at_ns - MS


def test_wait_for_a_busy_executor_ends_after_its_saving() -> None:
    fleet = first_is_busy({"waits": 100.0})
    fleet.now_ns = 50
    fleet.push("waits")
    assert fleet.begun() == []
    assert hold_ends_ns(fleet) == 950
    fleet.now_ns = 949
    fleet.push("other")
    assert fleet.begun() == [("other", 1)]
    fleet.answer_at(1)
    assert fleet.begun() == []
    fleet.now_ns = 950
    fleet.answer_at(1)
    assert fleet.begun() == [("waits", 1)]


def test_request_is_not_held_again_after_its_wait() -> None:
    fleet = first_is_busy({"waits": 100.0}, **ONE_ROW)
    fleet.push("waits")
    assert fleet.begun() == []
    assert hold_ends_ns(fleet) == 900
    fleet.doubt(1)
    fleet.now_ns = 900 + MS
    assert fleet.begun() == []
    assert fleet.wakes_at_ns is None  # nobody looks at it again and again
    fleet.doubt(1, is_doubtful=False)
    assert fleet.begun() == [("waits", 1)]


def test_scheduler_wakes_at_the_first_end_of_a_wait() -> None:
    fleet = first_is_busy({"long": 100.0, "short": 700.0})
    fleet.push("long")
    fleet.push("short")
    assert fleet.begun() == []
    assert hold_ends_ns(fleet) == 300
    fleet.abort("short")
    assert fleet.begun() == []
    assert hold_ends_ns(fleet) == 900


def test_rows_run_ahead_while_somebody_waits_for_another_executor_only() -> None:
    features = make_config().features | {Feature.SEVERAL_TOKENS}
    small = {"features": features, "max_run_ahead": 4, "max_run_ahead_ms": 1000}
    fleet = RoutedFleet(small | {"max_model_len": 30}, small | {"max_num_seqs": 1})
    fleet.push("long", 40)
    fleet.push("short", max_tokens=20)
    assert fleet.begun() == [("long", 1), ("short", 0)]
    fleet.push("next long", 41)
    fleet.settle()
    for _ in range(3):
        fleet.step()
    plans = [fleet.held[machine.address][0][0] for machine in fleet.numbered]
    assert plans[0].work.num_run_on_tokens is not None
    assert plans[1].work.num_run_on_tokens is None


def test_request_does_not_wait_when_that_saves_little() -> None:
    fleet = first_is_busy({"r1": 900.0})
    fleet.push("r1")
    assert fleet.begun() == [("r1", 1)]


# -- what an arrival costs -------------------------------------------------------------------------


def lines_of_a_step(num_executors: int) -> int:
    """Lines that run for the result of a step where every executor computes, and one waits."""
    fleet = RoutedFleet(*[{"num_device_blocks": 400}] * num_executors, policy="priority")
    for number in range(num_executors):
        fleet.begin(number, [1 + number % 90, 2, 3])
    fleet.push("arrival", priority=-1)
    assert fleet.begun() == []
    plan, batch = fleet.held["executor:0"].popleft()
    result = fleet.machines["executor:0"].compute(batch)
    done = events.StepCompleted("executor:0", decode_result(result, len(plan.work.row_ids)))
    return num_lines(lambda: fleet.scheduler.handle(done, 200 * MS))


def test_arrival_costs_in_proportion_to_the_executors() -> None:
    few, many, most = map(lines_of_a_step, (16, 32, 64))
    assert most - many <= 2.2 * (many - few)


def num_plans(fleet: RoutedFleet, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List that records the executor number at every `plan_step` call."""
    numbers = {id(fleet.engine(number)): number for number in range(len(fleet.numbered))}
    asked: list[int] = []
    plan_step = Engine.plan_step

    def count(engine: Engine, *arguments: object) -> object:
        asked.append(numbers[id(engine)])
        return plan_step(engine, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "plan_step", count)
    return asked


def test_arrival_has_one_idle_executor_plan_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = RoutedFleet(*[{}] * 16)
    asked = num_plans(fleet, monkeypatch)
    fleet.push("arrival")
    ((_, number),) = fleet.begun()
    assert asked == [number]


def assignment_at(fleet: RoutedFleet, name: str, number: int) -> Assignment:
    """Why a request began at this executor."""
    assert (name, number) in fleet.begun()
    return fleet.assignments[name].assignment


def test_more_in_the_cache_decided_when_that_is_what_differs() -> None:
    fleet = measured({}, {})
    fleet.compute(1, SYSTEM)
    fleet.push("r1", [*SYSTEM, 50, 51])
    given = assignment_at(fleet, "r1", 1)
    assert given.why is AssignedFor.MOST_CACHED
    assert given.num_cached == len(SYSTEM)
    assert given.num_cached_elsewhere == 0
    assert given.cost_us is not None
    assert given.cost_elsewhere_us is not None
    # 40 tokens more, of a millisecond each, which count for more than those that only wait.
    assert given.cost_elsewhere_us - given.cost_us == pytest.approx(40_000 * 1.25, rel=0.1)


def test_less_before_it_decided_when_nobody_has_its_prefix() -> None:
    fleet = measured({}, {})
    fleet.begin(0, [88] * 100)
    fleet.push("r1", [5] * 20)
    given = assignment_at(fleet, "r1", 1)
    assert (given.why, given.num_running) == (AssignedFor.SOONEST, 0)


def test_nothing_decided_when_executors_are_alike() -> None:
    fleet = measured({}, {})
    fleet.push("r1", SYSTEM)
    fleet.begun()
    assert fleet.assignments["r1"].assignment.why is AssignedFor.AS_GOOD


def test_nothing_decided_when_there_is_one_executor() -> None:
    fleet = measured({})
    fleet.begin(0, [88] * 20)
    fleet.push("r1", SYSTEM)
    fleet.answer_at(0)
    given = assignment_at(fleet, "r1", 0)
    assert (given.why, given.num_running) == (AssignedFor.ONLY_ONE, 1)
    assert given.cost_elsewhere_us is None


def test_waiting_for_a_better_one_is_told_while_it_lasts() -> None:
    fleet = busy_holder()
    fleet.push("r1", [*LONG, 50])
    assert fleet.begun() == []
    ((_, blockers),) = fleet.scheduler.heads()
    assert blockers == [("executor:0", "awaits_better"), ("executor:1", "awaits_better")]


def test_assignment_says_that_waiting_was_in_vain() -> None:
    fleet = busy_holder()
    fleet.push("r1", [*LONG, 50])
    assert fleet.begun() == []
    fleet.now_ns = 10**12
    given = assignment_at(fleet, "r1", 1)
    assert given.why is AssignedFor.WAITED_LONG_ENOUGH
    assert given.num_cached_elsewhere == len(LONG)


def test_assignment_names_a_better_executor_that_is_busy() -> None:
    fleet = busy_holder()
    fleet.push("r1", [*LONG[:76], 50])
    given = assignment_at(fleet, "r1", 1)
    assert (given.why, given.num_cached_elsewhere) == (AssignedFor.BETTER_IS_BUSY, 76)
    assert given.cost_us is not None
    assert given.cost_elsewhere_us is not None
    assert 0.8 * given.cost_us < given.cost_elsewhere_us < given.cost_us


def test_assignment_names_the_lack_of_room() -> None:
    small_pool = {"num_device_blocks": 32}
    fleet = measured(small_pool, small_pool)
    begun = [fleet.begin(number, [70 + number] * 60) for number in (0, 1)]
    fleet.push("r1", [5] * 74)
    fleet.step()
    ((_, blockers),) = fleet.scheduler.heads()
    assert [blocker for _, blocker in blockers] == ["blocks", "blocks"]
    fleet.abort(begun[1])
    fleet.answer_at(1)
    assert assignment_at(fleet, "r1", 1).why is AssignedFor.NO_ROOM_ANYWHERE
