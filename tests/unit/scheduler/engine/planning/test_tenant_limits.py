"""Rows, blocks and prompt tokens that tenants leave to each other under the policy fair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.scheduler.engine.planning import MAX_BYPASSES, PromptLimit, PromptTokens
from scheduler_service.scheduler.values import (
    PreemptionMode,
    Request,
    RequestStatus,
    SchedulingParams,
)
from tests.support.core.driver import CoreDriver, make_request


def fair_driver(**options: object) -> CoreDriver:
    values: dict[str, object] = {"queue_policy": "fair", "prefix_caching": False}
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def add(driver: CoreDriver, tenant: str, prompt: int = 3, max_tokens: int = 50) -> Request:
    return driver.add(
        prompt,
        f"{tenant}{driver.num_requests}",
        scheduling=SchedulingParams(tenant=tenant),
        max_tokens=max_tokens,
        ignore_eos=True,
    )


def make_known(driver: CoreDriver, tenant: str) -> None:
    """The tenant has asked for something before."""
    add(driver, tenant, max_tokens=1)
    driver.run()


def running(driver: CoreDriver, tenant: str) -> list[str]:
    requests = driver.core.placement.requests.values()
    return [
        request.request_id
        for request in requests
        if request.status is RequestStatus.RUNNING and request.scheduling.tenant == tenant
    ]


@pytest.mark.parametrize(
    ("policy", "is_other_known", "num_running"),
    [("fair", True, 3), ("fair", False, 4), ("fcfs", True, 4)],
)
def test_flood_leaves_a_row_to_others_that_are_known(
    policy: str, is_other_known: bool, num_running: int
) -> None:
    driver = fair_driver(max_num_seqs=4, queue_policy=policy)
    if is_other_known:
        make_known(driver, "b")
    for _ in range(6):
        add(driver, "a")
    driver.step()
    assert len(running(driver, "a")) == num_running
    newcomer = add(driver, "b")
    driver.step()
    assert (newcomer.status is RequestStatus.RUNNING) is (num_running == 3)


@pytest.mark.parametrize("ended_by", ["itself", "its client", "another executor"])
def test_flood_has_all_rows_when_others_are_long_idle(
    ended_by: str,
) -> None:
    driver = fair_driver(
        max_num_seqs=64, max_num_batched_tokens=2048, num_device_blocks=1000, max_num_waiting=128
    )
    other = add(driver, "b", max_tokens=1 if ended_by == "itself" else 50)
    driver.step()
    if ended_by == "its client":
        driver.core.abort(other.request_id)
    elif ended_by == "another executor":
        driver.core.withdraw(other.request_id)
    driver.core.tick(3600 * 10**9)
    flood = [add(driver, "a", prompt=32) for _ in range(64)]
    plan, _ = driver.step()
    assert plan.num_tokens == 64 * 32
    assert len(running(driver, "a")) == len(flood)


def test_request_has_the_last_row_after_max_bypasses() -> None:
    driver = fair_driver(max_num_seqs=2)
    make_known(driver, "b")
    add(driver, "a")
    passed = add(driver, "a")
    driver.step()
    assert passed.request_id not in running(driver, "a")
    passed.num_bypasses = MAX_BYPASSES
    driver.step()
    assert passed.status is RequestStatus.RUNNING


def test_flood_leaves_blocks_to_others_when_it_is_admitted() -> None:
    driver = fair_driver(num_device_blocks=40, max_num_seqs=8)
    make_known(driver, "b")
    for _ in range(3):
        add(driver, "a", prompt=52, max_tokens=2)  # 13 of 40 blocks
    driver.step()
    assert len(running(driver, "a")) == 2
    newcomer = add(driver, "b", prompt=20)
    driver.step()
    assert newcomer.status is RequestStatus.RUNNING


def test_last_of_the_flood_yields_when_its_rows_grow() -> None:
    driver = fair_driver(num_device_blocks=24, preemption_mode=PreemptionMode.RECOMPUTE)
    make_known(driver, "b")
    flood = [add(driver, "a", prompt=3) for _ in range(4)]
    newcomer = add(driver, "b", prompt=3)
    while not driver.core.num_preemptions:
        driver.step()
    assert flood[-1].num_preemptions == 1
    assert newcomer.num_preemptions == 0
    assert driver.core.num_free_blocks > 0


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_newcomer_yields_only_when_tenants_have_no_shares(policy: str) -> None:
    driver = fair_driver(
        num_device_blocks=12, queue_policy=policy, preemption_mode=PreemptionMode.RECOMPUTE
    )
    for _ in range(3):
        add(driver, "a", prompt=7, max_tokens=30)
    newcomer = add(driver, "b", prompt=7, max_tokens=30)
    while not driver.core.num_preemptions:
        driver.step()
    assert newcomer.num_preemptions == (policy == "fcfs")


def test_swapped_request_of_a_flood_holds_up_no_tenant() -> None:
    driver = fair_driver(
        num_device_blocks=24, num_host_blocks=24, preemption_mode=PreemptionMode.SWAP
    )
    make_known(driver, "b")
    for _ in range(4):
        add(driver, "a", prompt=3)
    while not driver.core.num_swapped:
        driver.step()
    newcomer = add(driver, "b", prompt=3)
    driver.step()
    driver.step()
    assert newcomer.status is RequestStatus.RUNNING
    assert driver.core.num_swapped > 0


def flood_until_it_yields(mode: PreemptionMode, num_steps: int | None = None) -> CoreDriver:
    """A flood of which some wait, and so many steps, or until one of it has just yielded."""
    host = {"num_host_blocks": 64, "block_bytes": 4096} if mode is PreemptionMode.SWAP else {}
    driver = fair_driver(num_device_blocks=24, preemption_mode=mode, **host)
    make_known(driver, "b")
    for _ in range(12):
        add(driver, "a", prompt=3)
    while (
        driver.core.num_preemptions == 0 if num_steps is None else driver.core.num_steps < num_steps
    ):
        driver.step()
    return driver


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_newcomer_is_admitted_in_the_step_in_which_others_yield(mode: PreemptionMode) -> None:
    num_steps = flood_until_it_yields(mode).core.num_steps
    driver = flood_until_it_yields(mode, num_steps - 1)
    assert driver.core.num_preemptions == 0
    newcomer = add(driver, "b", prompt=3)
    running_before = set(running(driver, "a"))
    driver.step()
    assert driver.core.num_preemptions > 0
    assert newcomer.status is RequestStatus.RUNNING
    assert set(running(driver, "a")) < running_before


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


def add_prompt(driver: CoreDriver, tenant: str, prompt: int, max_tokens: int = 8) -> Request:
    name = f"{tenant}{driver.num_requests}"
    scheduling = SchedulingParams(tenant=tenant)
    return driver.add(prompt, name, scheduling=scheduling, max_tokens=max_tokens, ignore_eos=True)


def num_tokens_of_next(driver: CoreDriver) -> int:
    plan, _ = driver.step()
    return int(plan.work.num_new_tokens.sum())


@pytest.mark.parametrize(
    ("policy", "num_tokens", "most"),
    [
        ("fair", 64, 64),
        ("fair", 512, 512),
        ("fair", 2048, 512),
        ("fair", 4096, 1024),
        ("fcfs", 2048, 2048),
    ],
)
def test_step_that_tenants_share_is_short(policy: str, num_tokens: int, most: int) -> None:
    driver = long_steps(policy, max_num_batched_tokens=num_tokens)
    add_prompt(driver, "b", 3, max_tokens=1)
    driver.run()
    for _ in range(4):
        add_prompt(driver, "a", 1500)
    assert [num_tokens_of_next(driver) for _ in range(2)] == [most, most]


def test_newcomer_is_not_behind_prompts_that_have_taken_all() -> None:
    driver = long_steps()
    add_prompt(driver, "b", 3, max_tokens=1)
    driver.run()
    add_prompt(driver, "a", 3, max_tokens=50)
    driver.step()
    for _ in range(4):
        add_prompt(driver, "a", 1500)
    driver.step()
    driver.plan()
    newcomer = add_prompt(driver, "b", 300)
    driver.answer()
    assert num_tokens_of_next(driver) == 1 + 476 + 300
    assert newcomer.status is RequestStatus.RUNNING


def test_whoever_was_passed_too_often_is_not_behind_them_either() -> None:
    driver = long_steps()
    add_prompt(driver, "b", 3, max_tokens=1)
    driver.run()
    requests = [add_prompt(driver, "a", 1500) for _ in range(4)]
    driver.step()
    requests[1].num_bypasses = MAX_BYPASSES
    assert num_tokens_of_next(driver) == 2 * 512
    assert requests[1].status is RequestStatus.RUNNING
    assert requests[2].status is RequestStatus.WAITING


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
def test_preempted_prompt_is_recomputed_in_small_parts_when_shared(
    num_tenants: int, sizes: list[int]
) -> None:
    driver = long_steps()
    if num_tenants > 1:
        add_prompt(driver, "b", 3, max_tokens=1)
        driver.run()
    request = add_prompt(driver, "a", 200, max_tokens=20)
    driver.step()
    driver.preempt(request)
    assert [num_tokens_of_next(driver) for _ in sizes] == sizes


def test_recomputed_prompts_hold_up_no_new_prompts() -> None:
    limit = PromptLimit(PromptTokens(512, 64), [])
    again, new = make_request(1, tenant="a"), make_request(2, tenant="b")
    again.num_preemptions = 1
    assert limit.num_for(again, is_overdue=False) == 64
    limit.take(again, 64)
    assert limit.num_for(again, is_overdue=False) == 0
    assert limit.num_for(again, is_overdue=True) == 1
    assert limit.num_for(new, is_overdue=False) == 448
