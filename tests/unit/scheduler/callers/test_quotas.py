"""Tests quotas of tenants against a model that counts with plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_service.callers import (
    FREE,
    NO_LIMITS,
    Quotas,
    RequestCost,
    TenantLimits,
    UsageBucket,
    num_computed_outputs,
)
from scheduler_service.scheduler.values import (
    BeamParams,
    Completion,
    FinishReason,
    Request,
    SamplingParams,
)
from splitserve_contract import DomainError

SECOND = 10**9
MINUTE = 60 * SECOND
TENANTS = ("a", "b", "c")


@dataclass
class Setting:
    """Quotas with a clock and limits that the test sets."""

    limits: dict[str, TenantLimits] = field(default_factory=dict)
    now_ns: int = 0

    def __post_init__(self) -> None:
        self.quotas = Quotas(lambda name: self.limits.get(name, NO_LIMITS), lambda: self.now_ns)

    def begin(self, tenant: str = "a", num_prompt: int = 1, num_resumed: int = 0) -> RequestCost:
        charge = self.quotas.charge(tenant, num_prompt, num_resumed)
        charge.begin()
        return charge

    def refusal(self, tenant: str = "a", num_resumed: int = 0) -> DomainError:
        with pytest.raises(DomainError) as caught:
            self.quotas.charge(tenant, 1, num_resumed)
        assert caught.value.reason == "QUOTA_EXCEEDED"
        return caught.value


def ended(num_outputs: int = 0, **params: Any) -> Request:  # noqa: ANN401
    """A request whose sequences have so many output tokens each."""
    request = Request.create("r", [1], SamplingParams(**params), arrival=1, seed=1)
    for sequence in request.sequences:
        sequence.token_ids = np.zeros(1 + num_outputs, np.int32)
    return request


@pytest.mark.parametrize(
    ("limits", "delay_s"),
    [
        (TenantLimits(requests_per_minute=2), 30),
        (TenantLimits(tokens_per_minute=20), 3),
        (TenantLimits(max_concurrent_requests=2), 1),
    ],
)
def test_request_is_refused_by_name_when_a_quota_is_used_up(
    limits: TenantLimits, delay_s: float
) -> None:
    setting = Setting({"a": limits, "b": limits})
    for _ in range(2):
        setting.begin(num_prompt=10)
    refusal = setting.refusal()
    ((name, value),) = (
        (name, getattr(limits, name))
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
        if getattr(limits, name) is not None
    )
    assert f"tenant 'a' has used up {name} {value}" in refusal.message
    assert refusal.retry_delay_s == pytest.approx(delay_s, abs=0.01)
    setting.begin("b")


def test_longest_delay_is_told_when_several_quotas_are_used_up() -> None:
    setting = Setting({"a": TenantLimits(requests_per_minute=1, max_concurrent_requests=1)})
    setting.begin()
    assert setting.refusal().retry_delay_s == pytest.approx(60, abs=0.01)


def test_outputs_are_charged_when_the_request_ends() -> None:
    setting = Setting({"a": TenantLimits(tokens_per_minute=60)})
    charge = setting.begin(num_prompt=10)
    setting.begin().end(ended())
    charge.end(ended(num_outputs=109))
    # 10 + 1 + 109 of 60: 60 are owed, and one is to be had.
    assert setting.refusal().retry_delay_s == pytest.approx(61, abs=0.01)
    setting.now_ns += int(61.01 * 10**9)
    setting.begin()


def test_resumed_request_is_refused_at_a_debt_of_a_minute() -> None:
    setting = Setting({"a": TenantLimits(tokens_per_minute=100)})
    setting.begin(num_prompt=150)
    setting.refusal()
    resumed = setting.begin(num_prompt=30, num_resumed=10)
    resumed.end(ended(num_outputs=10))  # it had these
    resumed = setting.begin(num_prompt=0, num_resumed=9)
    resumed.end(ended(num_outputs=10))
    assert setting.refusal(num_resumed=1).retry_delay_s == pytest.approx(0.6, abs=0.01)


def test_resumed_request_may_have_as_many_beside_it_again() -> None:
    setting = Setting({"a": TenantLimits(max_concurrent_requests=2)})
    for num_resumed in (0, 0, 1, 1):
        setting.begin(num_resumed=num_resumed)
    setting.refusal(num_resumed=1)


def test_request_costs_nothing_when_its_tenant_has_no_quota() -> None:
    setting = Setting({"a": TenantLimits(max_prompt_tokens=1)})
    assert setting.quotas.charge("a", 10**9, 0) is FREE
    assert setting.quotas.num_tenants == 0


def test_tenants_are_forgotten_when_nothing_is_left_of_them() -> None:
    setting = Setting({f"t{i}": TenantLimits(requests_per_minute=1) for i in range(10_000)})
    setting.begin("t0")  # and stays
    for number in range(1, 10_000):
        setting.begin(f"t{number}").end(ended())
        setting.now_ns += MINUTE // 10
        assert setting.quotas.num_tenants <= 64
    assert setting.quotas.num_running("t0") == 1


def test_computed_outputs_are_those_of_all_sequences() -> None:
    assert num_computed_outputs(ended(7)) == 7
    assert num_computed_outputs(ended(7, n=2, best_of=3)) == 21
    beams = ended(7, beam=BeamParams(4))
    assert num_computed_outputs(beams) == 28
    beams.completions = [Completion([1] * 9, FinishReason.LENGTH, None, 0.0)]
    assert num_computed_outputs(beams) == 36


class QuotaMachine(RuleBasedStateMachine):
    """Requests begin and end in any order; a model keeps the same books with plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        limits = TenantLimits(
            requests_per_minute=6, tokens_per_minute=600, max_concurrent_requests=3
        )
        self.setting = Setting(dict.fromkeys(TENANTS, limits))
        self.open: list[tuple[str, int, RequestCost]] = []
        # Used and not given time for: requests, tokens.
        self.used = {tenant: [0.0, 0.0] for tenant in TENANTS}

    @rule(
        tenant=st.sampled_from(TENANTS),
        num_prompt=st.integers(1, 400),
        num_resumed=st.sampled_from([0, 0, 5]),
    )
    def submit(self, tenant: str, num_prompt: int, num_resumed: int) -> None:
        used = self.used[tenant]
        times = 2 if num_resumed else 1
        num_running = sum(name == tenant for name, _, _ in self.open)
        is_allowed = (
            num_running < 3 * times
            and used[0] + 1 <= 6 * times + 1e-6
            and used[1] + 1 <= 600 * times + 1e-6
        )
        if not is_allowed:
            assert (self.setting.refusal(tenant, num_resumed).retry_delay_s or 0) > 0
            return
        charge = self.setting.quotas.charge(tenant, num_prompt, num_resumed)
        charge.begin()
        used[0] += 1
        used[1] += num_prompt + num_resumed
        self.open.append((tenant, num_resumed, charge))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_outputs=st.integers(0, 300))
    def end(self, data: st.DataObject, num_outputs: int) -> None:
        at = data.draw(st.integers(0, len(self.open) - 1))
        tenant, num_resumed, charge = self.open.pop(at)
        charge.end(ended(num_outputs))
        self.used[tenant][1] += max(0, num_outputs - num_resumed)

    @rule(pause_s=st.sampled_from([1, 7, 60, 600]))
    def wait(self, pause_s: int) -> None:
        self.setting.now_ns += pause_s * 10**9
        for used in self.used.values():
            used[0] = max(0.0, used[0] - pause_s * 6 / 60)
            used[1] = max(0.0, used[1] - pause_s * 600 / 60)

    @rule(tenant=st.sampled_from(TENANTS), is_limited=st.booleans())
    def reload(self, tenant: str, is_limited: bool) -> None:
        """A limit of something else changes: what was used is still known."""
        most = 5 if is_limited else None
        self.setting.limits[tenant] = replace(self.setting.limits[tenant], max_sequences=most)

    @invariant()
    def running_are_those_that_did_not_end(self) -> None:
        for tenant in TENANTS:
            num_running = sum(name == tenant for name, _, _ in self.open)
            assert self.setting.quotas.num_running(tenant) == num_running


TestQuotaMachine = QuotaMachine.TestCase


amounts = st.integers(0, 10_000)
rates = st.sampled_from([0.5, 1.0, 7.0, 60.0, 1e6])
pauses = st.integers(0, 10 * MINUTE)


def test_bucket_holds_a_minutes_worth_when_nothing_was_used() -> None:
    bucket = UsageBucket()
    for _ in range(3):
        assert bucket.delay_s(3, MINUTE) == 0
        bucket.use(1, 3, MINUTE)
    assert bucket.delay_s(3, MINUTE) == pytest.approx(20, abs=0.01)
    assert bucket.delay_s(3, MINUTE + 10 * SECOND) == pytest.approx(10, abs=0.01)
    assert bucket.delay_s(3, MINUTE + 20 * SECOND) == 0


def test_debt_is_waited_for() -> None:
    bucket = UsageBucket()
    bucket.use(180, 60, 0)
    assert bucket.delay_s(60, 0) == pytest.approx(121, abs=0.01)
    assert bucket.delay_s(60, 0, debt=60) == pytest.approx(61, abs=0.01)
    assert bucket.delay_s(60, 0, debt=121) == 0


def test_what_was_used_counts_against_a_limit_that_changes() -> None:
    bucket = UsageBucket()
    bucket.use(10, 10, 0)
    assert bucket.delay_s(20, 0) == 0
    assert bucket.delay_s(5, 0) == pytest.approx(72, abs=0.01)


def test_half_a_request_a_minute_is_one_in_two() -> None:
    bucket = UsageBucket()
    assert bucket.delay_s(0.5, 0) == 0
    bucket.use(1, 0.5, 0)
    assert bucket.delay_s(0.5, 0) == pytest.approx(120, abs=0.01)


@pytest.mark.parametrize("per_minute", [1e-3, 5e-324])
def test_nobody_is_told_to_wait_for_more_than_a_day(per_minute: float) -> None:
    bucket = UsageBucket()
    bucket.use(1e9, per_minute, 0)
    assert bucket.delay_s(per_minute, 0) == 86400


@given(st.lists(st.tuples(amounts, pauses), max_size=20), rates)
def test_there_is_room_after_the_delay_and_not_much_before(
    uses: list[tuple[int, int]], rate: float
) -> None:
    bucket, now_ns = UsageBucket(), 0
    for amount, pause_ns in uses:
        bucket.use(amount, rate, now_ns)
        now_ns += pause_ns
    delay_s = bucket.delay_s(rate, now_ns)
    if 0 < delay_s < 86400:
        assert bucket.delay_s(rate, now_ns + int(delay_s * SECOND)) == 0
        # What a millisecond brings, and what the sums are rounded by.
        assert bucket.delay_s(rate, now_ns + int((delay_s - 0.003) * SECOND)) > 0


@given(st.lists(st.tuples(amounts, pauses), min_size=1, max_size=20), rates)
def test_no_more_is_let_through_than_the_limit_allows(
    asked: list[tuple[int, int]], rate: float
) -> None:
    bucket, now_ns, taken = UsageBucket(), 0, [0.0]
    for amount, pause_ns in asked:
        if bucket.delay_s(rate, now_ns) == 0:
            bucket.use(amount, rate, now_ns)
            taken.append(float(amount))
        now_ns += pause_ns
    # A minute's worth at once, what time brought, and what the last one overdrew.
    assert sum(taken) <= max(rate, 1) + rate * now_ns / MINUTE + max(taken) + 1e-3
