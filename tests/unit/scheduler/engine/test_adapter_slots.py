"""Adapter slots of an engine: what is loaded and evicted, and who waits for it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from scheduler_service.scheduler.engine import AdapterLoad
from scheduler_service.scheduler.values import (
    AdmissionBlocker,
    Feature,
    FinishReason,
    Request,
    RequestStatus,
    SchedulingParams,
    StepPlan,
)
from tests.support.core.driver import CoreDriver, names


class Loading:
    """A core whose executor loads adapters when the test says so."""

    def __init__(self, num_slots: int = 2, **options: object) -> None:
        values: dict[str, object] = {
            "features": frozenset({Feature.ADAPTER_LOADING}),
            "max_adapters": num_slots,
            "num_adapter_slots": num_slots,
            "prefix_caching": False,
            "max_num_waiting": 200,
        }
        self.driver = CoreDriver(**(values | options))  # type: ignore[arg-type]
        self.core = self.driver.core
        # What the executor was told, and has not done yet.
        self.told: list[AdapterLoad] = []
        self.on_executor: set[str] = set()

    def add(self, adapter: str, request_id: str = "", max_tokens: int = 50) -> Request:
        """Adds a request of a registered adapter, or of none (empty)."""
        scheduling = SchedulingParams(adapter=f"{adapter}@1" if adapter else "")
        request = self.driver.make_request(
            3, request_id or adapter, scheduling=scheduling, max_tokens=max_tokens
        )
        request.submitted_ns = self.core.placement.now_ns
        self.core.add(request)
        return request

    def plan(self) -> StepPlan | None:
        """Plans a step, whose rows must have loaded adapters."""
        plan = self.driver.plan()
        self.told += self.core.adapter_slots.take_begun()
        for name, _, _ in [] if plan is None else self.driver.rows_of(plan):
            request = self.core.find(name)
            assert request is not None
            assert request.scheduling.adapter in {"", *self.on_executor}
        return plan

    def rows(self) -> list[str]:
        """Plans a step; returns the requests of its rows."""
        plan = self.plan()
        return [] if plan is None else names(self.driver.rows_of(plan))

    def load(self, why_not: str = "") -> str:
        """The executor does what it was told first."""
        load = self.told.pop(0)
        self.on_executor &= set(load.kept)
        if not why_not:
            self.on_executor.add(load.adapter)
        self.core.adapter_loaded(load.adapter, why_not)
        return load.adapter.removesuffix("@1")

    def begin(self, adapter: str, max_tokens: int = 50) -> Request:
        """Adds a request and runs it once its adapter is loaded."""
        request = self.add(adapter, max_tokens=max_tokens)
        self.plan()
        if self.driver.in_flight:
            self.driver.answer()
        assert self.load() == adapter
        assert adapter in self.rows()
        self.driver.answer()
        return request


def test_request_waits_for_its_adapter_while_others_begin() -> None:
    loading = Loading()
    waiting = loading.add("a")
    loading.add("", "none")
    assert loading.rows() == ["none"]
    assert loading.told == [AdapterLoad("a@1", ())]
    assert loading.core.find_blocker(waiting) is AdmissionBlocker.ADAPTER_LOAD
    loading.driver.answer()
    loading.load()
    assert sorted(loading.rows()) == ["a", "none"]


def test_adapter_is_loaded_once_for_all_requests() -> None:
    loading = Loading()
    for number in range(40):
        loading.add("a", f"a{number}")
    loading.add("b")
    assert loading.rows() == []
    assert loading.told == [AdapterLoad("a@1", ()), AdapterLoad("b@1", ("a@1",))]
    assert (loading.load(), loading.load()) == ("a", "b")
    assert loading.rows() == [f"a{number}" for number in range(8)]


def test_least_recently_used_adapter_makes_way() -> None:
    loading = Loading()
    first, second = loading.begin("a"), loading.begin("b")
    for request in (second, first):
        loading.core.abort(request.request_id)
    loading.begin("c")
    assert loading.on_executor == {"a@1", "c@1"}
    assert loading.core.adapter_slots.num_evictions == 1


def test_adapter_of_a_row_stays_loaded_while_another_waits_for_a_slot() -> None:
    loading = Loading()
    loading.begin("a")
    second = loading.begin("b", max_tokens=2)
    third = loading.add("c")
    assert sorted(loading.rows()) == ["a", "b"]
    assert loading.told == []
    assert loading.core.find_blocker(third) is AdmissionBlocker.ADAPTER_SLOT
    loading.driver.answer()
    assert second.is_finished
    loading.plan()
    assert loading.told == [AdapterLoad("c@1", ("a@1",))]


def test_adapter_of_a_step_in_flight_stays_loaded() -> None:
    loading = Loading(num_slots=1)
    first = loading.begin("a")
    assert loading.rows() == ["a"]
    loading.core.abort(first.request_id)
    loading.add("b")
    assert loading.rows() == []
    assert loading.told == []
    loading.driver.answer()
    loading.plan()
    assert loading.told == [AdapterLoad("b@1", ())]


def test_requests_end_when_their_adapter_cannot_be_loaded() -> None:
    loading = Loading()
    bad, other = loading.add("a"), loading.add("", "none")
    loading.plan()
    loading.load("lora_alpha is 'x'; allowed: a number")
    loading.driver.answer()
    assert loading.rows() == ["none"]
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error == (
        "ADAPTER_INVALID",
        "adapter 'a@1' cannot be loaded: lora_alpha is 'x'; allowed: a number",
    )
    assert not other.is_finished


def test_later_request_tries_an_adapter_again_that_could_not_be_loaded() -> None:
    loading = Loading()
    loading.add("a", "early")
    loading.plan()
    loading.load("no memory")
    loading.core.tick(1)
    loading.add("a", "late")
    assert loading.rows() == []
    assert loading.told == [AdapterLoad("a@1", ())]
    loading.load()
    assert loading.rows() == ["late"]


def test_preempted_request_returns_when_its_adapter_is_loaded_again() -> None:
    loading = Loading(num_slots=1)
    preempted = loading.begin("a")
    loading.driver.preempt(preempted)
    loading.core.adapter_slots.load("b@1", (), 100, 0)  # as a more urgent request could have done
    loading.told += loading.core.adapter_slots.take_begun()
    assert loading.rows() == []
    assert loading.core.find_blocker(preempted) is AdmissionBlocker.ADAPTER_SLOT
    loading.load()
    assert loading.rows() == []
    assert loading.told == [AdapterLoad("a@1", ())]
    loading.load()
    assert loading.rows() == ["a"]
    assert preempted.status is RequestStatus.RUNNING


def test_slot_is_not_taken_from_an_adapter_whose_request_only_lacks_blocks() -> None:
    loading = Loading(num_slots=1, num_device_blocks=8, max_num_batched_tokens=64)
    loading.add("", "large", max_tokens=20)
    loading.plan()
    loading.driver.answer()
    blocked = loading.driver.make_request(
        26, "blocked", scheduling=SchedulingParams(adapter="a@1"), max_tokens=1
    )
    loading.core.add(blocked)
    loading.add("b", max_tokens=20)
    loading.plan()
    loading.driver.answer()
    loading.load()
    for _ in range(3):
        loading.plan()
        loading.driver.answer()
    assert loading.core.find_blocker(blocked) is AdmissionBlocker.BLOCKS
    assert loading.told == []


class RandomLoads:
    """Random requests of 7 adapters on 3 slots, and a random executor."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.loading = Loading(num_slots=3, num_device_blocks=24, max_num_seqs=5)
        self.requests: list[Request] = []

    def turn(self, now_ns: int) -> None:
        """One thing happens."""
        random, loading, driver = self.random, self.loading, self.loading.driver
        loading.core.tick(now_ns)
        actions: list[Callable[[], object]] = [self.submit]
        if loading.told:
            actions.append(lambda: loading.load("broken" if random.random() < 0.1 else ""))
        if driver.in_flight:
            actions.append(driver.answer)
        elif len(loading.core.placement.rows):
            actions.append(self.preempt)
        if len(driver.in_flight) < 2:
            actions += [loading.plan, loading.plan]
        random.choice(actions)()
        assert len(loading.on_executor) <= 3

    def submit(self) -> None:
        """Adds a request; sometimes aborts another one."""
        adapter = self.random.choice(["", *"abcdefg"])
        name = f"{adapter}{len(self.requests)}"
        if self.requests and self.random.random() < 0.1:
            self.loading.core.abort(self.random.choice(self.requests).request_id)
        self.requests.append(self.loading.add(adapter, name, self.random.randint(1, 9)))

    def preempt(self) -> None:
        """Preempts the least urgent request."""
        core = self.loading.core
        self.loading.driver.preempt(core.placement.rows.least_urgent.request)

    def settle(self) -> None:
        """The executor does all that it is told, until nothing is left."""
        for _ in range(4000):
            if not self.loading.core.num_unfinished:
                return
            self.loading.plan()
            if self.loading.told:
                self.loading.load()
            while self.loading.driver.in_flight:
                self.loading.driver.answer()


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_and_no_row_lacks_its_adapter(seed: int) -> None:
    run = RandomLoads(seed)
    for turn in range(300):
        run.turn(turn)
    run.settle()
    assert len(run.requests) > 30
    assert all(request.is_finished for request in run.requests)
    assert run.loading.core.adapter_slots.num_evictions > 3
