"""Rows and blocks that tenants leave to each other under the policy `fair`, and who yields them."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.planning.room import MAX_BYPASSES
from scheduler_service.scheduler.values.config import PreemptionMode
from scheduler_service.scheduler.values.request import Request, RequestStatus, SchedulingParams
from tests.support.core.driver import CoreDriver


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


def test_flood_leaves_a_row_to_others_when_they_are_known() -> None:
    driver = fair_driver(max_num_seqs=4)
    make_known(driver, "b")
    for _ in range(6):
        add(driver, "a")
    driver.step()
    assert len(running(driver, "a")) == 3
    newcomer = add(driver, "b")
    driver.step()
    assert newcomer.status is RequestStatus.RUNNING


def test_flood_has_all_rows_when_no_other_tenant_is_known() -> None:
    driver = fair_driver(max_num_seqs=4)
    for _ in range(6):
        add(driver, "a")
    driver.step()
    assert len(running(driver, "a")) == 4


@pytest.mark.parametrize("ended_by", ["itself", "its client", "another executor"])
def test_flood_has_all_rows_and_whole_steps_when_another_tenant_was_idle_for_an_hour(
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


def test_flood_has_all_rows_when_the_policy_is_not_fair() -> None:
    driver = fair_driver(max_num_seqs=4, queue_policy="fcfs")
    make_known(driver, "b")
    for _ in range(6):
        add(driver, "a")
    driver.step()
    assert len(running(driver, "a")) == 4


def test_request_has_the_last_row_when_it_was_passed_often_enough() -> None:
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
def test_newcomer_yields_when_blocks_lack_only_where_tenants_have_no_shares(policy: str) -> None:
    driver = fair_driver(
        num_device_blocks=12, queue_policy=policy, preemption_mode=PreemptionMode.RECOMPUTE
    )
    for _ in range(3):
        add(driver, "a", prompt=7, max_tokens=30)
    newcomer = add(driver, "b", prompt=7, max_tokens=30)
    while not driver.core.num_preemptions:
        driver.step()
    assert newcomer.num_preemptions == (policy == "fcfs")


def test_swapped_request_of_a_flood_keeps_nobody_waiting_when_its_share_is_exceeded() -> None:
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


def test_requests_of_all_tenants_end_when_a_flood_is_over() -> None:
    driver = fair_driver(num_device_blocks=30, max_num_seqs=4)
    for number in range(12):
        add(driver, "ab"[number % 3 == 0], prompt=5 + number, max_tokens=20)
    driver.run(depth=2)
    assert driver.core.num_running == driver.core.num_waiting == 0


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
