"""Tokens of prompts in a step that tenants share under the policy `fair`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.scheduler.engine.planning.room import MAX_BYPASSES
from scheduler_service.scheduler.engine.planning.rows import PromptLimit, PromptTokens
from scheduler_service.scheduler.values.request import Request, RequestStatus, SchedulingParams
from tests.support.core.driver import CoreDriver, make_config
from tests.support.core.queue_driver import make_request


def long_steps(policy: str = "fair", **options: object) -> CoreDriver:
    values: dict[str, object] = {
        "queue_policy": policy,
        "prefix_caching": False,
        "max_num_batched_tokens": 2048,
        "max_model_len": 4096,
        "num_device_blocks": 8192,
        "max_num_seqs": 16,
    }
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def add(driver: CoreDriver, tenant: str, prompt: int, max_tokens: int = 8) -> Request:
    name = f"{tenant}{driver.num_requests}"
    scheduling = SchedulingParams(tenant=tenant)
    return driver.add(prompt, name, scheduling=scheduling, max_tokens=max_tokens, ignore_eos=True)


def num_tokens_of_next(driver: CoreDriver) -> int:
    plan, _ = driver.step()
    return int(plan.work.num_new_tokens.sum())


@pytest.mark.parametrize(("num_tokens", "most"), [(64, 64), (512, 512), (2048, 512), (8192, 2048)])
def test_a_quarter_of_a_step_is_for_prompts_unless_it_is_short(num_tokens: int, most: int) -> None:
    tokens = PromptTokens.of(make_config(max_num_batched_tokens=num_tokens))
    assert (tokens.num_most, tokens.num_again) == (most, most // 8)


@pytest.mark.parametrize(("policy", "most"), [("fair", 512), ("fcfs", 2048)])
def test_step_that_tenants_share_is_short(policy: str, most: int) -> None:
    driver = long_steps(policy)
    add(driver, "b", 3, max_tokens=1)
    driver.run()
    for _ in range(4):
        add(driver, "a", 1500)
    assert [num_tokens_of_next(driver) for _ in range(2)] == [most, most]


def test_step_is_full_when_one_tenant_is_known() -> None:
    driver = long_steps()
    for _ in range(4):
        add(driver, "a", 1500)
    assert num_tokens_of_next(driver) == 2048


def test_newcomer_is_not_behind_prompts_that_have_taken_all() -> None:
    driver = long_steps()
    add(driver, "b", 3, max_tokens=1)
    driver.run()
    add(driver, "a", 3, max_tokens=50)
    driver.step()
    for _ in range(4):
        add(driver, "a", 1500)
    driver.step()
    driver.plan()
    newcomer = add(driver, "b", 300)
    driver.answer()
    assert num_tokens_of_next(driver) == 1 + 476 + 300
    assert newcomer.status is RequestStatus.RUNNING


def test_whoever_was_passed_too_often_is_not_behind_them_either() -> None:
    driver = long_steps()
    add(driver, "b", 3, max_tokens=1)
    driver.run()
    requests = [add(driver, "a", 1500) for _ in range(4)]
    driver.step()
    requests[1].num_bypasses = MAX_BYPASSES
    assert num_tokens_of_next(driver) == 2 * 512
    assert requests[1].status is RequestStatus.RUNNING
    assert requests[2].status is RequestStatus.WAITING


def test_prompts_are_computed_in_turn_by_service_when_all_tenants_flood() -> None:
    driver = long_steps(tenant_weights={"a": 3.0}, max_num_seqs=64, max_num_waiting=1024)
    for _ in range(60):
        add(driver, "a", 1024, max_tokens=1)
        add(driver, "b", 1024, max_tokens=1)
    num_done = {"a": 0, "b": 0}
    while sum(num_done.values()) < 40:
        _, events = driver.step()
        for request in events.finished:
            num_done[request.scheduling.tenant] += 1
    assert num_done["a"] == pytest.approx(30, abs=2)


@given(
    num_running=st.integers(0, 512),
    running=st.sets(st.sampled_from("abc"), max_size=3),
    asked=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 2000)), max_size=12),
)
def test_each_tenant_exceeds_the_limit_once_at_most(
    num_running: int, running: set[str], asked: list[tuple[str, int]]
) -> None:
    shares = [num_running, *[0] * (len(running) - 1)]
    prompts = [make_request(-1 - at, tenant=tenant) for at, tenant in enumerate(sorted(running))]
    limit = PromptLimit(PromptTokens(512, 64), zip(prompts, shares, strict=False))
    num_left, newcomers = 512 - (num_running if running else 0), set[str]()
    for arrival, (tenant, num_prompt_tokens) in enumerate(asked):
        request = make_request(arrival, tenant=tenant)
        num_tokens = min(num_prompt_tokens, limit.num_for(request, is_overdue=False))
        assert 0 <= num_tokens <= 512
        if num_tokens > max(num_left, 0):
            assert tenant not in running | newcomers
            newcomers.add(tenant)
        if num_tokens:
            limit.take(request, num_tokens)
            num_left -= num_tokens
    assert not newcomers or running


@pytest.mark.parametrize(
    ("num_tenants", "sizes"), [(1, [201, 1, 1, 1]), (2, [64, 64, 64, 9])], ids=["alone", "shared"]
)
def test_what_yielded_is_computed_again_in_small_parts_where_tenants_share(
    num_tenants: int, sizes: list[int]
) -> None:
    driver = long_steps()
    if num_tenants > 1:
        add(driver, "b", 3, max_tokens=1)
        driver.run()
    request = add(driver, "a", 200, max_tokens=20)
    driver.step()
    driver.preempt(request)
    assert [num_tokens_of_next(driver) for _ in sizes] == sizes


def test_prompts_of_others_are_not_held_up_by_what_is_computed_again() -> None:
    limit = PromptLimit(PromptTokens(512, 64), [])
    again, new = make_request(1, tenant="a"), make_request(2, tenant="b")
    again.num_preemptions = 1
    assert limit.num_for(again, is_overdue=False) == 64
    limit.take(again, 64)
    assert limit.num_for(again, is_overdue=False) == 0
    assert limit.num_for(again, is_overdue=True) == 1
    assert limit.num_for(new, is_overdue=False) == 448
