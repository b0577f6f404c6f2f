"""Engines that begin requests of a queue which is not theirs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.queue import WaitingQueue, make_queue_policy
from scheduler_service.scheduler.values import (
    AdmissionBlocker,
    Feature,
    PreemptionCause,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulingParams,
    StepEvents,
    StepOutcome,
    StepPlan,
    StepStatus,
)
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
def test_find_blocker_names_what_a_request_lacks(
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


def test_find_blocker_puts_preempted_requests_first() -> None:
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


def test_suspect_from_the_queue_is_tried_alone() -> None:
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


def test_next_suspect_is_tried_when_one_ends_in_its_turn() -> None:
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


def test_prefix_is_found_after_an_engine_with_other_blocks() -> None:
    caching: dict[str, object] = {"prefix_caching": True}
    fleet = SharedQueue("fcfs", {**caching, "block_size": 4}, {**caching, "block_size": 8})
    fleet.add(17, max_tokens=1)
    fleet.step(0)
    request = fleet.add(17)
    for engine in (*fleet.engines, *fleet.engines):
        engine.prepare(request)
    fleet.step(0)
    assert request.num_cached_tokens == 16
