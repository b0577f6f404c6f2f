"""One queue for all executors: policies hold across them, and requests wait for any of them."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler import events
from scheduler_service.scheduler.executor_losses import LossCause
from scheduler_service.scheduler.values.config import Feature
from tests.unit.scheduler.scheduler.routed_fleet import MS, ONE_ROW, RoutedFleet

POLICIES = ["fcfs", "priority", "fair", "deadline"]


def test_requests_wait_for_whichever_executor_is_free_first() -> None:
    fleet = RoutedFleet(ONE_ROW, ONE_ROW)
    for name in "abcd":
        fleet.push(name)
    assert set(fleet.names_begun()) == {"a", "b"}
    assert fleet.step() == []
    assert fleet.scheduler.num_queued == 2
    (at_second,) = fleet.running(1)
    fleet.abort(at_second)
    assert fleet.step() == [("c", 1)]


def test_first_come_is_first_served_across_executors() -> None:
    fleet = RoutedFleet(ONE_ROW, ONE_ROW, ONE_ROW)
    names = [f"r{number}" for number in range(9)]
    for name in names:
        fleet.push(name)
    served = sorted(fleet.names_begun())  # in one turn, though each executor has its own
    while len(served) < 9:
        fleet.abort(served[len(served) - 3])
        served += [name for name, _ in fleet.step()]
    assert served == names


def test_urgent_request_goes_before_all_that_wait_wherever_there_is_room() -> None:
    fleet = RoutedFleet(ONE_ROW, ONE_ROW, policy="priority")
    fleet.push("a", priority=-1)
    fleet.push("b", priority=-1)
    fleet.begun()
    fleet.push("later")
    fleet.push("urgent", priority=-1)
    assert fleet.step() == []
    fleet.abort("a")
    assert [name for name, _ in fleet.step()] == ["urgent"]


def test_urgent_request_goes_where_somebody_less_urgent_makes_way() -> None:
    fleet = RoutedFleet(ONE_ROW, ONE_ROW, policy="priority")
    fleet.push("important", priority=-5)
    fleet.push("ordinary")
    where = dict(fleet.begun())
    fleet.step()
    fleet.push("urgent", priority=-3)
    assert fleet.step() == [("urgent", where["ordinary"])]
    assert fleet.running(where["ordinary"]) == ["urgent"]


def test_tenant_has_its_share_of_all_executors_together() -> None:
    fleet = RoutedFleet(ONE_ROW, ONE_ROW, policy="fair")
    for number in range(20):
        fleet.push(f"flood{number}", tenant="flood", max_tokens=4)
    for number in range(5):
        fleet.push(f"few{number}", tenant="few", max_tokens=4)
    order = fleet.names_begun()
    while len(order) < 12:
        order += [name for name, _ in fleet.step()]
    # Both tenants ask for more than half: they get as much as the other.
    assert sum(name.startswith("few") for name in order[:10]) == 5


def test_tokens_count_for_a_tenant_whatever_executor_they_come_from() -> None:
    fleet = RoutedFleet(ONE_ROW, ONE_ROW, policy="fair")
    fleet.push("a", tenant="one")
    ((_, first),) = fleet.begun()
    fleet.push("b", tenant="other")
    fleet.begun()
    fleet.push("a2", tenant="one")
    fleet.push("b2", tenant="other")
    for _ in range(5):
        fleet.answer_at(first)
    fleet.abort("a")
    assert fleet.step() == [("b2", first)]


def test_weights_of_tenants_may_change_while_requests_wait() -> None:
    fleet = RoutedFleet(ONE_ROW, policy="fair")
    fleet.push("now", tenant="z")
    fleet.begun()
    for number in range(8):
        fleet.push(f"a{number}", 8, tenant="a", max_tokens=1)
        fleet.push(f"b{number}", 8, tenant="b", max_tokens=1)
    fleet.handle(events.TenantsWeighed({"a": 3.0}))
    fleet.abort("now")
    order: list[str] = []
    while len(order) < 8:
        order += [name for name, _ in fleet.step()]
    assert sum(name.startswith("a") for name in order) == 6


def test_large_request_holds_up_one_executor_and_not_the_fleet() -> None:
    small_pool = {"num_device_blocks": 16}
    fleet = RoutedFleet(small_pool, small_pool)
    fleet.push("x", 30, max_tokens=30)
    fleet.push("y", 30, max_tokens=30, cache_salt="y")
    assert sorted(number for _, number in fleet.begun()) == [0, 1]
    fleet.step()
    fleet.push("large", 40, max_tokens=5, cache_salt="large")
    assert fleet.step() == []
    for number in range(3):
        fleet.push(f"small{number}", max_tokens=5)
    begun: list[tuple[str, int]] = []
    for _ in range(20):
        begun += fleet.step()
    # It waits at one of them, where no later one begins before it, and those go elsewhere.
    assert {name for name, _ in begun} == {"small0", "small1", "small2"}
    assert len({number for _, number in begun}) == 1
    for _ in range(20):
        begun += fleet.step()
    assert begun[-1][0] == "large"


@pytest.mark.parametrize("policy", POLICIES)
def test_all_requests_end_whatever_their_size(policy: str) -> None:
    pools = {"num_device_blocks": 12}, {"num_device_blocks": 40}, ONE_ROW
    fleet = RoutedFleet(*pools, policy=policy, num_credits=2)
    for number in range(40):
        length = (3, 3, 30, 90)[number % 4]
        fleet.push(f"r{number}", length, max_tokens=4, tenant=f"t{number % 3}", priority=number % 2)
    fleet.run()
    assert fleet.finished.keys() == {f"r{number}" for number in range(40)}
    assert all(request.error is None for request in fleet.finished.values())


def test_request_ends_when_its_deadline_is_past_and_no_executor_is_there() -> None:
    fleet = RoutedFleet(policy="deadline")
    late, lasting = fleet.push("late", deadline_ns=1_000), fleet.push("lasting")
    assert fleet.wakes_at_ns == 1_000 + MS  # a little late
    fleet.now_ns = 1_000 + MS
    fleet.settle()
    assert late.error is not None
    assert late.error[0] == "DEADLINE_UNREACHABLE"
    assert not lasting.is_finished
    assert fleet.scheduler.num_queued == 1
    assert fleet.wakes_at_ns is None


def test_executor_that_lacked_blocks_is_asked_again_when_it_has_more() -> None:
    fleet = RoutedFleet({"num_device_blocks": 20}, {"num_device_blocks": 20})
    for name in "abcdef":
        fleet.push(name, 40, max_tokens=20, cache_salt=name)
    where = dict(fleet.begun())
    assert where.keys() == set("abcd")
    for _ in range(3):
        assert fleet.step() == []
    fleet.abort("a")
    assert fleet.step() == [("e", where["a"])]
    assert fleet.step() == []
    fleet.abort("b")
    assert fleet.step() == [("f", where["b"])]


def test_request_that_lacked_blocks_beside_others_begins_when_they_have_left() -> None:
    fleet = RoutedFleet({"num_device_blocks": 20})
    for name, length in (("a", 40), ("b", 40), ("c", 50)):
        fleet.push(name, length, max_tokens=20, cache_salt=name)
    begun = fleet.names_begun()
    assert "c" not in begun
    for _ in range(3):
        for name in begun:
            fleet.abort(name)
        begun = [name for name, _ in fleet.step()]
        if not fleet.scheduler.num_queued:
            break
    assert fleet.scheduler.num_queued == 0


def test_request_that_lacks_a_slot_for_its_adapter_holds_up_nobody() -> None:
    fleet = RoutedFleet({"max_adapters": 1, "features": frozenset({Feature.ADAPTERS})})
    fleet.push("holder", adapter="a")
    fleet.begun()
    fleet.push("blocked", adapter="b")
    fleet.push("plain")
    assert fleet.step() == [("plain", 0)]
    assert fleet.running(0) == ["holder", "plain"]


def test_request_that_was_charged_for_is_not_charged_again_when_its_executor_is_lost() -> None:
    fleet = RoutedFleet(ONE_ROW, ONE_ROW, policy="fair")
    fleet.push("a", 60, tenant="a")
    ((_, number),) = fleet.begun()
    fleet.doubt(1 - number)
    fleet.lose(fleet.numbered[number], LossCause.BLAMELESS)
    fleet.push("later", tenant="a")
    fleet.push("b", tenant="b")
    fleet.doubt(1 - number, is_doubtful=False)
    assert fleet.begun() == [("a", 1 - number)]
    fleet.abort("a")
    # Tenant b was put level with a, which did not pay again.
    assert fleet.step() == [("later", 1 - number)]


# -- requests that do not fit every executor -------------------------------------------------------

SMALL_AND_LARGE = ({"num_device_blocks": 4}, {"num_device_blocks": 64, **ONE_ROW})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_there", [True, False])
def test_requests_that_fit_elsewhere_hold_up_nobody(policy: str, is_there: bool) -> None:
    fleet = RoutedFleet(*SMALL_AND_LARGE, policy=policy)
    fleet.push("first", 100, max_tokens=90)
    assert fleet.begun() == [("first", 1)]
    # More than are passed where there is a lack of room.
    for number in range(20):
        fleet.push(f"large{number}", 100, max_tokens=90)
    fleet.push("small", max_tokens=4)
    if not is_there:
        fleet.lose(fleet.numbered[1], LossCause.BLAMELESS)
    assert fleet.begun() == [("small", 0)]


@pytest.mark.parametrize("policy", POLICIES)
def test_any_number_of_requests_that_fit_elsewhere_hold_up_nobody(policy: str) -> None:
    fleet = RoutedFleet(*SMALL_AND_LARGE, policy=policy)
    fleet.push("first", 100, max_tokens=90)
    assert fleet.begun() == [("first", 1)]
    for number in range(300):
        fleet.push(f"large{number}", 100, max_tokens=90)
    fleet.push("small", max_tokens=4)
    assert fleet.begun() == [("small", 0)]
    assert fleet.scheduler.num_unfitting == 0
    fleet.abort("first")
    assert ("large0", 1) in fleet.step()


def test_requests_that_fit_no_executor_that_is_there_wake_nobody() -> None:
    fleet = RoutedFleet(*SMALL_AND_LARGE)
    fleet.lose(fleet.numbered[1], LossCause.BLAMELESS)
    fleet.settle()
    expected_until_ns = fleet.wakes_at_ns
    for number in range(100):
        fleet.push(f"large{number}", 100, max_tokens=90)
    assert fleet.begun() == []
    assert fleet.wakes_at_ns == expected_until_ns


def test_requests_that_fit_no_executor_begin_when_one_of_another_kind_joins() -> None:
    fleet = RoutedFleet(
        {"num_device_blocks": 4}, {"num_device_blocks": 64}, {"num_device_blocks": 8}
    )
    _, large, middle = fleet.numbered
    for machine in (large, middle):
        fleet.lose(machine, LossCause.BLAMELESS)
    for number in range(10):
        fleet.push(f"large{number}", 100, max_tokens=90)
        fleet.push(f"middle{number}", 20, max_tokens=8)
    assert fleet.begun() == []
    assert fleet.scheduler.num_unfitting == 20

    middle.restart()
    fleet.join(middle)
    assert {name[:-1] for name in fleet.names_begun()} == {"middle"}
    assert fleet.scheduler.num_unfitting == 10
    large.restart()
    fleet.join(large)
    assert ("large0", 1) in fleet.begun()
