"""What the queue policies promise, whatever arrives, is preempted, ends or cannot run."""

from __future__ import annotations

import os
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler.queue import OpenLanes, WaitingQueue
from scheduler_service.scheduler.values import Request
from tests.support.core.driver import make_queue, make_request

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "40"))
TURN_EVERY = 8
property_settings = settings(max_examples=NUM_EXAMPLES, deadline=None)


class SlotServer:
    """Runs requests in a few slots. Whoever loses its slot begins its work again."""

    def __init__(self, queue: WaitingQueue, num_slots: int, max_bypasses: int) -> None:
        self.queue, self.num_slots, self.max_bypasses = queue, num_slots, max_bypasses
        self.work: dict[Request, int] = {}
        self.running: dict[Request, int] = {}
        self.latest_admission: dict[Request, int] = {}
        self.evictions: set[tuple[Request, Request]] = set()
        self.num_admissions = 0  # but for those of protected requests that came back

    def arrive(self, request: Request, work: int) -> None:
        self.work[request] = work
        self.push(request)

    def push(self, request: Request) -> None:
        unfinished = [*self.queue, *self.running]
        older = [other for other in unfinished if other.arrival < request.arrival]
        num_turns = 1 + sum(not other.is_protected for other in older)
        num_bypasses = 2 * self.max_bypasses * (1 + len(older))
        self.latest_admission[request] = (
            self.num_admissions + (TURN_EVERY + 1) * num_turns + num_bypasses
        )
        self.queue.push(request)

    def preempt(self, victim: Request) -> None:
        del self.running[victim]
        self.push(victim)

    def preempt_least_urgent(self) -> None:
        if len(self.running) > 1:
            self.preempt(max(self.running, key=self.queue.rank))

    def step(self) -> None:
        for request in list(self.running):
            self.running[request] -= 1
            if self.running[request] == 0:
                del self.running[request]
        blocked: Request | None = None
        for request in self.queue.candidates():
            if not self.make_room(request):
                blocked = blocked or request
            else:
                self.admit(request)
                if blocked is not None:
                    blocked.num_bypasses += 1
            if blocked is not None and blocked.num_bypasses >= self.max_bypasses:
                break

    def make_room(self, request: Request) -> bool:
        if len(self.running) < self.num_slots:
            return True
        victims = [r for r in self.running if self.queue.may_preempt(request, r)]
        if not victims:
            return False
        victim = max(victims, key=self.queue.rank)
        assert not victim.is_protected
        assert not self.queue.may_preempt(victim, request)
        assert (victim, request) not in self.evictions
        self.evictions.add((request, victim))
        self.preempt(victim)
        return True

    def admit(self, request: Request) -> None:
        was_protected = request.is_protected
        self.queue.begun(request, 1)
        assert was_protected or self.num_admissions < self.latest_admission[request]
        self.running[request] = self.work[request]
        self.num_admissions += not was_protected
        for waiting in self.queue:
            if not waiting.is_protected:
                assert self.num_admissions < self.latest_admission[waiting]


@property_settings
@given(
    name=st.sampled_from(["priority", "deadline"]),
    num_slots=st.integers(1, 4),
    max_bypasses=st.integers(0, 2),
    most_urgent=st.integers(-3, 0),
    num_steps=st.integers(1, 120),
    rng=st.randoms(use_true_random=False),
)
def test_request_has_its_turn_in_bounded_time_when_others_never_cease_to_come(
    name: str, num_slots: int, max_bypasses: int, most_urgent: int, num_steps: int, rng: Random
) -> None:
    server = SlotServer(make_queue(name), num_slots, max_bypasses)
    for _ in range(num_steps):
        for _ in range(rng.choice([0, 1, 1, 2])):
            priority = rng.choice([most_urgent, most_urgent, 1, 2])
            deadline_ns = rng.choice([None, rng.randint(0, 50)])
            request = make_request(len(server.work), priority, "", deadline_ns)
            server.arrive(request, work=1 if priority == most_urgent else rng.randint(2, 6))
        if rng.random() < 0.1:
            server.preempt_least_urgent()
        server.step()
    for _ in range(20 * len(server.work)):
        server.step()
    assert len(server.queue) == 0
    assert not server.running


@property_settings
@given(
    name=st.sampled_from(["fcfs", "priority", "deadline"]),
    requests=st.lists(
        st.tuples(st.integers(-1, 1), st.none() | st.integers(0, 3)), min_size=20, max_size=40
    ),
    rng=st.randoms(use_true_random=False),
)
def test_candidates_are_the_smallest_ranks_but_for_turns_when_some_are_admitted(
    name: str, requests: list[tuple[int, int | None]], rng: Random
) -> None:
    queue = make_queue(name)
    waiting = [
        make_request(arrival, priority, deadline_ns=deadline_ns)
        for arrival, (priority, deadline_ns) in enumerate(requests)
    ]
    for request in waiting:
        queue.push(request)
    untried, num_since_turn = list(waiting), 0
    for request in queue.candidates():
        expected = min(untried, key=queue.rank)
        if name != "fcfs" and num_since_turn >= TURN_EVERY and waiting[0] in untried:
            expected = waiting[0]
        assert request is expected
        untried.remove(request)
        if rng.random() < 0.7:
            had_turn = name != "fcfs" and num_since_turn >= TURN_EVERY and request is waiting[0]
            queue.begun(request, 1)
            waiting.remove(request)
            assert request.is_protected is had_turn
            num_since_turn = 0 if had_turn else num_since_turn + 1
    assert not untried
    assert sorted(queue, key=queue.rank) == sorted(waiting, key=queue.rank)


@property_settings
@given(
    name=st.sampled_from(["fcfs", "priority", "deadline"]),
    requests=st.lists(
        st.tuples(st.integers(-1, 1), st.none() | st.integers(0, 9), st.sampled_from(["", "x"])),
        max_size=40,
    ),
    now_ns=st.integers(0, 10),
    lanes=st.none() | st.sets(st.sampled_from(["", "x"])),
)
def test_candidates_are_of_open_lanes_and_in_time_when_some_are_not(
    name: str,
    requests: list[tuple[int, int | None, str]],
    now_ns: int,
    lanes: set[str] | None,
) -> None:
    queue = make_queue(name)
    waiting = [
        make_request(arrival, priority, deadline_ns=deadline_ns, adapter=adapter)
        for arrival, (priority, deadline_ns, adapter) in enumerate(requests)
    ]
    for request in waiting:
        queue.push(request)
    is_open = [r for r in waiting if lanes is None or r.scheduling.adapter in lanes]
    in_time = [r for r in is_open if name != "deadline" or not _is_past(r, now_ns)]
    queue.tick(now_ns)
    assert list(queue.candidates(OpenLanes(adapters=lanes))) == sorted(in_time, key=queue.rank)
    num_overdue = 0
    while (overdue := queue.overdue()) is not None:
        assert _is_past(overdue, now_ns)
        queue.remove(overdue)
        num_overdue += 1
    assert num_overdue == (sum(_is_past(r, now_ns) for r in waiting) if name == "deadline" else 0)


def _is_past(request: Request, now_ns: int) -> bool:
    deadline_ns = request.scheduling.deadline_ns
    return deadline_ns is not None and deadline_ns < now_ns
