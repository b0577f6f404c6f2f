"""One queue for all executors: policies hold across them, and requests wait for any of them."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler import LossCause, RequestAssigned, RequestMoved, events
from scheduler_service.scheduler.values import AdmissionBlocker, Feature, PreemptionMode
from splitserve_contract import DomainError
from tests.support.core.checks import check_blocks, check_requests, check_rows
from tests.support.core.machines import VOCAB_SIZE
from tests.support.fakes.fake_model import expected_tokens
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


def test_urgent_request_goes_first_wherever_there_is_room() -> None:
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


def test_waiting_request_ends_at_its_deadline_without_executors() -> None:
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


def test_executor_is_asked_again_when_it_has_more_blocks() -> None:
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


def test_request_without_an_adapter_slot_holds_up_nobody() -> None:
    fleet = RoutedFleet({"max_adapters": 1, "features": frozenset({Feature.ADAPTERS})})
    fleet.push("holder", adapter="a")
    fleet.begun()
    fleet.push("blocked", adapter="b")
    fleet.push("plain")
    assert fleet.step() == [("plain", 0)]
    assert fleet.running(0) == ["holder", "plain"]


def test_request_is_charged_once_when_its_executor_is_lost() -> None:
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
    for number in range(300):
        fleet.push(f"large{number}", 100, max_tokens=90)
    fleet.push("small", max_tokens=4)
    if not is_there:
        fleet.lose(fleet.numbered[1], LossCause.BLAMELESS)
    assert fleet.begun() == [("small", 0)]
    if is_there:
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


def test_unfitting_requests_begin_when_a_larger_executor_joins() -> None:
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


# -- executors with few blocks ---------------------------------------------------------------------


class CheckedFleet(RoutedFleet):
    """Checks every engine after each event."""

    def _check(self) -> None:
        super()._check()
        for executor in self.scheduler.executors.values():
            check_blocks(executor.engine.placement)
            check_requests(executor.engine.placement)
            check_rows(executor.engine.placement)


@pytest.mark.cases(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_requests_begin_once_when_blocks_are_few(policy: str, mode: PreemptionMode) -> None:
    pool = {"num_device_blocks": 14, "num_host_blocks": 14, "max_num_seqs": 4}
    few = {**pool, "preemption_mode": mode, "prefix_caching": False}
    fleet = CheckedFleet(few, few, policy=policy, num_credits=2)
    prompts = [[1 + n, *range(2, 6 + n % 4)] for n in range(24)]
    for n, prompt in enumerate(prompts):
        fleet.push(f"r{n}", prompt, max_tokens=20, tenant=f"t{n % 3}", priority=n % 2)

    fleet.run()

    assert sum(fleet.engine(number).num_preemptions for number in (0, 1)) > 0
    assigned = fleet.effects_of(RequestAssigned)
    assert len(assigned) == 24 + len(fleet.effects_of(RequestMoved))
    assert {each.address for each in assigned} == {"executor:0", "executor:1"}
    for n, prompt in enumerate(prompts, 1):
        assert fleet.tokens[n] == expected_tokens(prompt, 20, 0, VOCAB_SIZE)


@pytest.mark.parametrize("lost", [0, 1])  # the executor of its reservation is one of them
def test_large_request_begins_when_either_executor_is_lost(lost: int) -> None:
    few = {"num_device_blocks": 8, "prefix_caching": False}
    fleet = RoutedFleet(few, few, num_credits=2)
    for name in "ab":
        fleet.push(name, 20, max_tokens=6)
    fleet.begun()
    large = fleet.push("large", 28, max_tokens=2)
    for machine in fleet.numbered:
        fleet.answer(machine)
    for executor in fleet.scheduler.executors.values():
        assert fleet.scheduler.obstacle(large, executor) is AdmissionBlocker.BLOCKS

    fleet.lose(fleet.numbered[lost], LossCause.BLAMELESS)
    begun = fleet.begun()
    fleet.run()

    assert ("large", 1 - lost) in [*begun, *fleet.begun()]
    assert fleet.finished.keys() == {"a", "b", "large"}


# -- places ----------------------------------------------------------------------------------------


def refusal(fleet: RoutedFleet, tenant: str = "") -> str:
    """Message with which one more request is refused."""
    with pytest.raises(DomainError) as refused:
        fleet.scheduler.check(fleet.make_request("refused", tenant=tenant))
    assert refused.value.reason == "QUEUE_FULL"
    assert refused.value.retry_delay_s
    return refused.value.message


def test_queue_counts_free_rows_as_places() -> None:
    fleet = RoutedFleet({"max_num_seqs": 2}, max_num_waiting=1)
    for name in "abc":
        fleet.push(name)
    assert "3 requests wait; allowed: 3" in refusal(fleet)
    fleet.settle()
    assert fleet.scheduler.num_waiting == 1
    assert "1 requests wait; allowed: 1" in refusal(fleet)


def test_requests_of_a_lost_executor_exceed_a_full_queue() -> None:
    fleet = RoutedFleet(ONE_ROW, ONE_ROW, max_num_waiting=1)
    for name in "ab":
        fleet.push(name)
    fleet.settle()
    for name in "cd":
        fleet.push(name)
    fleet.lose(fleet.numbered[0])
    assert fleet.scheduler.num_waiting == 3
    fleet.run()
    assert fleet.finished.keys() == set("abcd")


def test_last_places_are_for_tenants_that_have_none() -> None:
    fleet = RoutedFleet(ONE_ROW, policy="fair", max_num_waiting=4)
    fleet.push("d", tenant="d")
    fleet.settle()
    for number, tenant in enumerate(("b", "a", "a")):
        fleet.push(f"r{number}", tenant=tenant)
    assert "3 requests wait; allowed: 4, some of them reserved" in refusal(fleet, tenant="a")
    fleet.scheduler.check(fleet.make_request("taken", tenant="c"))
