"""Engines that begin requests of a queue which is not theirs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from scheduler_service.scheduler.engine.engine import Engine
from scheduler_service.scheduler.queue.queue_policy import make_queue_policy
from scheduler_service.scheduler.queue.waiting_queue import WaitingQueue
from scheduler_service.scheduler.values.admission import AdmissionBlocker
from scheduler_service.scheduler.values.config import Feature, PreemptionMode
from scheduler_service.scheduler.values.plan import (
    PreemptionCause,
    StepEvents,
    StepOutcome,
    StepPlan,
    StepStatus,
)
from scheduler_service.scheduler.values.request import Request, RequestStatus, SchedulingParams
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from tests.support.core.checks import check_blocks, check_requests, check_rows
from tests.support.core.driver import make_config


class SharedQueue:
    """Engines and the queue that they share; every step is answered at once."""

    def __init__(self, policy: str = "fcfs", *options: dict[str, object]) -> None:
        self.queue = WaitingQueue(make_queue_policy(policy, {}))
        values: dict[str, object] = {"queue_policy": policy, "prefix_caching": False}
        self.configs = [make_config(**(values | each)) for each in options or ({}, {})]
        self.engines = [Engine(config, self.queue) for config in self.configs]
        self.begun: list[tuple[str, int]] = []
        self.num_requests = 0

    def add(self, num_tokens: int, name: str = "", **options: object) -> Request:
        """Pushes a request; `options` are those of its scheduling, and `max_tokens`."""
        self.num_requests += 1
        params = SamplingParams(max_tokens=options.pop("max_tokens", 3))  # type: ignore[arg-type]
        request = Request.create(
            name or f"r{self.num_requests}",
            list(range(1, num_tokens + 1)),
            params,
            arrival=self.num_requests,
            seed=0,
            scheduling=SchedulingParams(**options),  # type: ignore[arg-type]
        )
        request.status = RequestStatus.WAITING
        self.queue.push(request)
        return request

    def plan(self, number: int) -> StepPlan | None:
        """Plans a step of an engine."""
        plan = self.engines[number].plan_step(self.queue)
        self.begun += [(request.request_id, number) for request in self.queue.take_begun()]
        return plan

    def answer(self, number: int, plan: StepPlan, status: StepStatus = StepStatus.OK) -> StepEvents:
        """Answers a step of an engine; every row that samples gets a token."""
        samples = plan.work.samples
        sampled = np.ones(len(plan.work.row_ids), np.bool_) if samples is None else samples
        token_ids = np.where(sampled, 7, -1).astype(np.int32)
        events = self.engines[number].apply(StepOutcome(plan.step_id, status, token_ids))
        self.queue.charge(events.num_sampled)
        self.take(events)
        return events

    def take(self, events: StepEvents) -> None:
        """Removes what has ended from the queue."""
        for request in events.finished:
            self.queue.ended(request.request_id)

    def step(self, number: int) -> StepPlan | None:
        """Plans and answers a step of an engine."""
        plan = self.plan(number)
        self.take(self.engines[number].take_ended())
        if plan is not None:
            self.answer(number, plan)
        self.check()
        return plan

    def check(self) -> None:
        """No request is in two places, and each engine is sound."""
        places = Counter(request.request_id for request in self.queue)
        for engine in self.engines:
            places.update(list(engine.placement.requests))
            check_blocks(engine.placement)
            check_requests(engine.placement)
            check_rows(engine.placement)
        assert max(places.values(), default=1) == 1


def running(engine: Engine) -> list[str]:
    """The requests that have a row."""
    return [sequence.request.request_id for sequence in engine.placement.rows.running]


# -- one engine ------------------------------------------------------------------------------------


def test_request_gets_a_row_when_there_is_room() -> None:
    fleet = SharedQueue()
    request = fleet.add(5)
    assert fleet.engines[0].find_blocker(request) is None
    assert request in fleet.queue
    plan = fleet.plan(0)
    assert plan is not None
    assert plan.work.num_new_tokens.tolist() == [5]
    assert request not in fleet.queue
    assert request.status is RequestStatus.RUNNING


@pytest.mark.parametrize(
    ("options", "blocker"),
    [
        ({"max_num_seqs": 1}, AdmissionBlocker.ROWS),
        ({"num_device_blocks": 4}, AdmissionBlocker.BLOCKS),
        (
            {"max_adapters": 1, "features": frozenset({Feature.ADAPTERS})},
            AdmissionBlocker.ADAPTER_SLOT,
        ),
    ],
)
def test_engine_says_what_a_request_lacks_when_it_cannot_have_a_row(
    options: dict[str, object], blocker: AdmissionBlocker
) -> None:
    fleet = SharedQueue("fcfs", options)
    names = ("a", "b") if blocker is AdmissionBlocker.ADAPTER_SLOT else ("", "")
    fleet.add(9, adapter=names[0])
    second = fleet.add(9, adapter=names[1])
    fleet.step(0)
    assert len(running(fleet.engines[0])) == 1
    assert fleet.engines[0].find_blocker(second) is blocker
    assert second in fleet.queue


def test_less_urgent_request_is_preempted_when_no_row_is_free() -> None:
    fleet = SharedQueue("priority", {"max_num_seqs": 1})
    patient = fleet.add(5, priority=1)
    fleet.step(0)
    urgent, third = fleet.add(5, priority=0), fleet.add(5, priority=1)
    assert fleet.engines[0].find_blocker(urgent) is AdmissionBlocker.ROWS
    fleet.step(0)
    assert running(fleet.engines[0]) == [urgent.request_id]
    assert patient.status is RequestStatus.PREEMPTED
    while not urgent.is_finished:
        fleet.step(0)
    fleet.step(0)
    assert running(fleet.engines[0]) == [patient.request_id]
    assert third in fleet.queue


def test_engine_says_that_preempted_requests_go_first_when_there_is_room() -> None:
    fleet = SharedQueue("fcfs", {"max_num_seqs": 2})
    older, third = fleet.add(5, max_tokens=20), fleet.add(5, max_tokens=20)
    fleet.step(0)
    placement = fleet.engines[0].placement
    placement.preempt(older, PreemptionCause.BLOCKS)
    waiting = fleet.add(5)
    assert fleet.engines[0].has_room
    assert fleet.engines[0].find_blocker(waiting) is AdmissionBlocker.OTHERS_FIRST
    assert fleet.engines[0].find_blocker(older) is None
    assert third.status is RequestStatus.RUNNING


def test_request_ends_when_it_was_resumed_with_all_its_tokens() -> None:
    fleet = SharedQueue()
    request = Request.create(
        "done", [1, 2], SamplingParams(max_tokens=2), arrival=1, seed=0, resume_token_ids=[[5, 6]]
    )
    fleet.queue.push(request)
    assert fleet.plan(0) is None
    assert fleet.engines[0].take_ended().finished == [request]
    assert len(fleet.queue) == 0


def test_suspect_is_tried_alone_when_an_engine_meets_it_in_the_queue() -> None:
    fleet = SharedQueue()
    fleet.add(3, "innocent", max_tokens=9)
    suspect = fleet.add(3, "suspect", max_tokens=1)
    suspect.trial_size = 1
    steps = []
    while not suspect.is_finished:
        plan = fleet.step(0)
        assert plan is not None
        steps.append(len(plan.work.row_ids))
    assert steps == [1] * len(steps)


def test_suspect_that_was_just_met_is_tried_when_the_one_before_it_ends_in_its_turn() -> None:
    fleet = SharedQueue("deadline", {})
    (engine,) = fleet.engines
    fleet.add(3, "earlier", max_tokens=60)
    while (plan := fleet.plan(0)) is not None:
        # From the smallest steps the engine learns how long one takes at least.
        token_ids = np.full(1, 7, np.int32)
        outcome = StepOutcome(plan.step_id, StepStatus.OK, token_ids, compute_us=1000)
        fleet.take(engine.apply(outcome))
    late = fleet.add(3, "late", deadline_ns=1000)
    fleet.queue.remove(late)
    other = fleet.add(3, "other", max_tokens=1)
    late.trial_size = other.trial_size = 1
    engine.adopt(late)

    plan = fleet.plan(0)

    assert late.is_finished
    assert plan is not None
    assert [row.sequence.request for row in plan.new_rows] == [other]


# -- several engines -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_preempted_request_stays_with_its_engine_when_another_has_room(
    mode: PreemptionMode,
) -> None:
    fleet = SharedQueue("fcfs", {"preemption_mode": mode, "num_host_blocks": 8}, {})
    request = fleet.add(5, max_tokens=9)
    fleet.step(0)
    fleet.engines[0].placement.preempt(request, PreemptionCause.BLOCKS)
    assert fleet.plan(1) is None
    while not request.is_finished:
        fleet.step(0)
    assert {number for _, number in fleet.begun} == {0}


def test_request_is_charged_once_when_an_engine_is_lost_and_another_begins_it() -> None:
    fleet = SharedQueue("fair")
    fleet.add(50, "a0", tenant="a")
    fleet.plan(0)
    (moved,) = fleet.engines[0].evacuate()
    fleet.queue.push(moved)
    fleet.add(9, "a1", tenant="a")
    fleet.add(9, "b0", tenant="b")
    fleet.configs[1] = make_config(queue_policy="fair", max_num_seqs=1, prefix_caching=False)
    fleet.engines[1:] = [Engine(fleet.configs[1], fleet.queue)]
    fleet.engines[0] = Engine(fleet.configs[0], fleet.queue)
    fleet.plan(1)
    assert running(fleet.engines[1]) == ["a0"]
    # b was put level with a: charged again, a would be 50 behind.
    assert [request.request_id for request in fleet.queue.candidates()] == ["a1", "b0"]


def test_turn_comes_once_for_all_engines_when_urgent_requests_keep_arriving() -> None:
    one_row: dict[str, object] = {"max_num_seqs": 1}
    fleet = SharedQueue("priority", one_row, one_row)
    fleet.add(3, "patient", priority=9, max_tokens=1)
    for number in range(12):
        fleet.add(3, f"urgent {number}", priority=-1, max_tokens=1)
        fleet.step(number % 2)
    assert [name for name, _ in fleet.begun].index("patient") == 8


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_full_engine_does_not_look_at_the_queue(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = SharedQueue(policy, {"max_num_seqs": 2})
    for number in range(2):
        fleet.add(3, tenant=f"t{number}", max_tokens=50)
    fleet.step(0)
    for number in range(9):
        fleet.add(3, tenant=f"t{number % 2}")
    looked: list[None] = []
    candidates = WaitingQueue.candidates

    def look(queue: WaitingQueue, *arguments: object) -> object:
        looked.append(None)
        return candidates(queue, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(WaitingQueue, "candidates", look)
    assert fleet.step(0) is not None
    assert looked == []


def test_last_row_is_for_a_tenant_without_any_when_others_wait_before_it() -> None:
    fleet = SharedQueue("fair", {"max_num_seqs": 3})
    for number in range(40):
        fleet.add(3, f"r{number}", tenant=f"t{number % 2}", max_tokens=50)
    fleet.step(0)
    assert running(fleet.engines[0]) == ["r0", "r1"]
    fleet.add(3, "newcomer", tenant="new")
    fleet.step(0)
    assert running(fleet.engines[0]) == ["r0", "r1", "newcomer"]


def test_request_is_prepared_anew_when_another_engine_has_other_limits() -> None:
    fleet = SharedQueue("fcfs", {"max_num_seqs": 1, "max_model_len": 200}, {"max_model_len": 20})
    fleet.add(3, max_tokens=100)
    request = fleet.add(3, max_tokens=100)
    fleet.step(0)
    fleet.engines[0].prepare(request)
    assert request.stop_len == 103
    fleet.step(1)
    assert running(fleet.engines[1]) == [request.request_id]
    assert request.stop_len == 20


def test_prefix_is_found_when_an_engine_with_other_blocks_has_looked_at_the_request() -> None:
    caching: dict[str, object] = {"prefix_caching": True}
    fleet = SharedQueue("fcfs", {**caching, "block_size": 4}, {**caching, "block_size": 8})
    fleet.add(17, max_tokens=1)
    fleet.step(0)
    request = fleet.add(17)
    for engine in (*fleet.engines, *fleet.engines):
        engine.prepare(request)
    fleet.step(0)
    assert request.num_cached_tokens == 16
