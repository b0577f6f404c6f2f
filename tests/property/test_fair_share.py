"""Fair shares, whatever arrives, is preempted, ends or cannot run."""

from __future__ import annotations

import os
from fractions import Fraction
from itertools import permutations
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_service.scheduler.queue import OpenLanes
from scheduler_service.scheduler.values import Request
from tests.support.core.driver import end, make_queue, make_request

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "40"))
property_settings = settings(max_examples=NUM_EXAMPLES, deadline=None)

# -- the order -------------------------------------------------------------------------------------

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.25}
TENANTS = ["a", "b", "c", "unknown"]
ADAPTERS = ["", "x", "y"]
tenants = st.sampled_from(TENANTS)


class FairShareMachine(RuleBasedStateMachine):
    """The queue against its definition, which looks at everything and forgets nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = make_queue("fair", weights=WEIGHTS)
        self.counters = dict.fromkeys(TENANTS, Fraction(0))
        self.waiting: dict[str, list[Request]] = {tenant: [] for tenant in TENANTS}
        self.running: list[Request] = []
        self.paid: set[Request] = set()
        self.last_to_leave = "a"
        self.num_arrivals = 0

    def charge(self, tenant: str, service: int) -> None:
        self.counters[tenant] += Fraction(service) / Fraction(WEIGHTS.get(tenant, 1))

    def push(self, request: Request) -> None:
        tenant = request.scheduling.tenant
        if not self.waiting[tenant]:
            levels = [self.counters[t] for t in TENANTS if self.waiting[t]]
            level = min(levels, default=self.counters[self.last_to_leave])
            self.counters[tenant] = max(self.counters[tenant], level)
        self.waiting[tenant].append(request)
        self.waiting[tenant].sort(key=lambda waiting: waiting.arrival)
        self.queue.push(request)

    def remove(self, request: Request) -> None:
        self.last_to_leave = request.scheduling.tenant
        self.waiting[self.last_to_leave].remove(request)

    @rule(tenant=tenants, count=st.integers(1, 6))
    def arrive(self, tenant: str, count: int) -> None:
        self.queue.forget_idle_tenants()
        for _ in range(count):
            self.num_arrivals += 1
            adapter = ADAPTERS[self.num_arrivals % len(ADAPTERS)]
            self.push(make_request(self.num_arrivals, tenant=tenant, adapter=adapter))

    @rule(
        can_run=st.lists(st.booleans(), max_size=4),
        num_uncached_tokens=st.integers(0, 9),
        lanes=st.none() | st.sets(st.sampled_from(ADAPTERS)),
    )
    def schedule(
        self, can_run: list[bool], num_uncached_tokens: int, lanes: set[str] | None
    ) -> None:
        open_lanes = set(ADAPTERS) if lanes is None else lanes
        tried = {r for r in self.queue if r.scheduling.adapter not in open_lanes}
        in_vain = dict.fromkeys(TENANTS, 0)
        for request in self.queue.candidates(OpenLanes(adapters=lanes)):
            assert request is self.expected(tried, in_vain)
            tried.add(request)
            if can_run and can_run.pop():
                self.admit(request, num_uncached_tokens)
            else:
                in_vain[request.scheduling.tenant] += 1
        assert self.expected(tried, in_vain) is None

    def expected(self, tried: set[Request], in_vain: dict[str, int]) -> Request | None:
        untried = [
            (in_vain[tenant], self.counters[tenant], request.arrival, request)
            for tenant in TENANTS
            for request in self.waiting[tenant]
            if request not in tried
        ]
        return min(untried)[-1] if untried else None

    def admit(self, request: Request, num_uncached_tokens: int) -> None:
        if request not in self.paid:
            self.charge(request.scheduling.tenant, num_uncached_tokens)
        self.paid.add(request)
        self.queue.begun(request, num_uncached_tokens)
        self.remove(request)
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0), num_tokens=st.integers(1, 5))
    def sample(self, index: int, num_tokens: int) -> None:
        tenant = self.running[index % len(self.running)].scheduling.tenant
        self.charge(tenant, 2 * num_tokens)
        self.queue.charge({tenant: num_tokens})

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0), is_finished=st.booleans())
    def leave(self, index: int, is_finished: bool) -> None:
        request = self.running.pop(index % len(self.running))
        if is_finished:
            end(self.queue, request)
        else:
            self.push(request)

    @precondition(lambda self: len(self.queue) > 0)
    @rule(index=st.integers(0))
    def abort(self, index: int) -> None:
        request = list(self.queue)[index % len(self.queue)]
        end(self.queue, request)
        self.remove(request)

    @invariant()
    def same_requests_wait(self) -> None:
        assert len(self.queue) == sum(map(len, self.waiting.values()))
        assert set(self.queue) == {r for waiting in self.waiting.values() for r in waiting}


TestFairShareMachine = FairShareMachine.TestCase
TestFairShareMachine.settings = settings(
    max_examples=NUM_EXAMPLES, stateful_step_count=40, deadline=None
)


# -- the bound -------------------------------------------------------------------------------------

MAX_PROMPT = 12
MAX_OUTPUT = 6


class FairServer:
    """Slots of one token a step; `service` is what a tenant was charged for."""

    def __init__(self, weights: dict[str, float], num_slots: int) -> None:
        self.queue = make_queue("fair", weights=weights)
        self.num_slots = num_slots
        self.service: dict[str, int] = {}
        self.todo: dict[Request, tuple[int, int]] = {}
        self.running: dict[Request, int] = {}
        self.admissions: list[Request] = []

    def arrive(self, tenant: str, num_uncached_tokens: int, num_output_tokens: int) -> Request:
        request = make_request(len(self.todo), tenant=tenant)
        self.todo[request] = (num_uncached_tokens, num_output_tokens)
        self.queue.push(request)
        return request

    def num_waiting(self, tenant: str) -> int:
        return sum(request.scheduling.tenant == tenant for request in self.queue)

    def preempt_youngest(self) -> None:
        victim = max(self.running, key=self.queue.rank, default=None)
        if victim is not None:
            self.todo[victim] = (0, self.running.pop(victim))
            self.queue.push(victim)

    def step(self) -> None:
        for request in self.queue.candidates():
            if len(self.running) == self.num_slots:
                break
            num_uncached_tokens, self.running[request] = self.todo[request]
            # Computing it again after a preemption is more work, but not for its tenant.
            self.queue.begun(request, num_uncached_tokens or 1000)
            self.admissions.append(request)
            self.serve(request.scheduling.tenant, num_uncached_tokens)
        assert len(self.running) == self.num_slots or not len(self.queue), "not work-conserving"
        for request in list(self.running):
            self.running[request] -= 1
            self.queue.charge({request.scheduling.tenant: 1})
            self.serve(request.scheduling.tenant, 2)
            if self.running[request] == 0:
                end(self.queue, request)
                del self.running[request]

    def serve(self, tenant: str, service: int) -> None:
        self.service[tenant] = self.service.get(tenant, 0) + service


@property_settings
@given(
    weights=st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.0, 7.3]), min_size=2, max_size=4),
    num_slots=st.integers(1, 5),
    num_steps=st.integers(1, 60),
    rng=st.randoms(use_true_random=False),
)
def test_service_of_tenants_differs_by_no_more_than_the_bound_when_they_are_backlogged(
    weights: list[float], num_slots: int, num_steps: int, rng: Random
) -> None:
    """Theorem 4.4 of the paper, with weights; its M is here all that the slots can put out.

    Between two admissions a tenant's counter moves away from the least one by no more than a
    prompt and the outputs of all that runs, so that is the bound for one tenant.
    """
    weight_of = {f"t{index}": weight for index, weight in enumerate(weights)}
    server = FairServer(weight_of, num_slots)
    normalised: list[dict[str, float]] = []
    for _ in range(num_steps):
        for tenant in weight_of:
            for _ in range(num_slots + 1 - server.num_waiting(tenant)):
                server.arrive(tenant, rng.randint(1, MAX_PROMPT), rng.randint(1, MAX_OUTPUT))
        if rng.random() < 0.5:
            server.arrive(f"passing{rng.randint(0, 2)}", 1, MAX_OUTPUT)
        if rng.random() < 0.2:
            server.preempt_youngest()
        server.step()
        normalised.append({t: server.service.get(t, 0) / w for t, w in weight_of.items()})
    most = MAX_PROMPT + 2 * num_slots * MAX_OUTPUT
    for one, other in permutations(weight_of, 2):
        differences = [served[one] - served[other] for served in normalised]
        bound = most / weight_of[one] + most / weight_of[other]
        assert max(differences) - min(differences) <= bound + 1e-6


@property_settings
@given(
    num_slots=st.integers(1, 4),
    num_steps_before=st.integers(0, 20),
    num_requests=st.integers(1, 5),
    flood_weight=st.sampled_from([0.5, 1.0, 4.0]),
)
def test_tenant_is_not_held_back_when_another_floods_the_queue(
    num_slots: int, num_steps_before: int, num_requests: int, flood_weight: float
) -> None:
    """Each request of the other waits for no more of the flood's than what evens out its own."""
    server = FairServer({"flood": flood_weight}, num_slots)
    for _ in range(500):
        server.arrive("flood", MAX_PROMPT, MAX_OUTPUT)
    for _ in range(num_steps_before):
        server.step()
    num_before = len(server.admissions)
    other = {server.arrive("other", MAX_PROMPT, MAX_OUTPUT) for _ in range(num_requests)}
    while not other <= set(server.admissions):
        server.step()
    last = max(server.admissions.index(request) for request in other)
    num_of_flood = last + 1 - num_requests - num_before
    served_to_other = (num_requests - 1) * (MAX_PROMPT + 2 * MAX_OUTPUT)
    assert num_of_flood <= 1 + served_to_other * flood_weight / MAX_PROMPT
