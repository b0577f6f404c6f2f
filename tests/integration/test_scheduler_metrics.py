"""Tests that metrics of a scheduler are what clients and executors saw."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.service import Readiness, SchedulerMetrics
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client import AsyncClient, SamplingParams
from splitserve_contract import DomainError
from splitserve_metrics import SCHEDULER_METRICS, MetricsAddress
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.metrics import Shown
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process
from tests.support.security.credentials import ListedAudit, LocalCall


@dataclass(frozen=True, slots=True)
class Stack:
    """A scheduler whose metrics are read without a connection."""

    scheduler: SchedulerInProcess
    client: AsyncClient
    metrics: SchedulerMetrics

    def read(self) -> Shown:
        return Shown(self.metrics.page(self.scheduler.cluster, Readiness.READY))


@asynccontextmanager
async def stack(
    *executors: FakeExecutor, config: ClusterConfig | None = None
) -> AsyncIterator[Stack]:
    metrics = SchedulerMetrics(MetricsAddress("127.0.0.1:0"))
    audit = metrics.counted(ListedAudit(), lambda _: False)
    async with (
        scheduler_in_process(
            *executors,
            config=config,
            audit=audit,
            watchers=[metrics.watch],
            counted_calls=metrics.counted_calls,
        ) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        yield Stack(scheduler, client, metrics)


async def test_metrics_count_what_clients_got_when_requests_share_steps() -> None:
    async with stack(FakeExecutor()) as running:
        lengths = [3, 9, 17]
        completed = await asyncio.gather(
            *(
                running.client.complete([number, 1, 2], SamplingParams(seed=1, max_tokens=length))
                for number, length in enumerate(lengths)
            )
        )
        shown = running.read()

    num_tokens = sum(len(each.completions[0].token_ids) for each in completed)
    assert num_tokens == sum(lengths)
    assert shown.value("splitserve_output_tokens_total") == num_tokens
    assert shown.value("splitserve_prompt_tokens_total") == 9
    assert shown.value("splitserve_time_to_first_token_seconds_count") == 3
    assert shown.value("splitserve_inter_token_latency_seconds_count") == num_tokens - 3
    assert shown.value("splitserve_queue_time_seconds_count") == 3
    assert shown.value("splitserve_requests_total", reason="length") == 3
    steps = shown.total("splitserve_steps_total")
    assert shown.value("splitserve_step_duration_seconds_count", phase="round_trip") == steps
    # Each row of a step is a token or a part of a prompt.
    assert shown.value("splitserve_step_tokens_sum") >= num_tokens + 9 - 3


async def test_output_tokens_of_resumed_requests_are_those_computed_here() -> None:
    async with stack(FakeExecutor()) as running:
        params = SamplingParams(seed=1, max_tokens=9)
        events = running.client.generate([1, 2, 3], params, resume_token_ids=[4, 5, 6, 7])
        assert [event async for event in events]
        shown = running.read()

    assert shown.value("splitserve_output_tokens_total") == 5
    assert shown.value("splitserve_tenant_output_tokens_total", tenant="other") == 5


async def test_metrics_have_all_of_the_table_when_everything_has_happened() -> None:
    small = FakeExecutor(num_device_blocks=24, num_host_blocks=16)
    config = ClusterConfig(max_num_seqs=8, reconnect_timeout_s=0.1, step_patience_s=300.0)
    async with stack(small, config=config) as running:
        await asyncio.gather(
            *(
                running.client.complete([number, 1, 2, 3, 4], SamplingParams(seed=1, max_tokens=40))
                for number in range(8)
            )
        )
        shown = running.read()
        cores = [engine.engine for engine in running.scheduler.cluster.executors]
        address = small.address

    assert shown.total("splitserve_preemptions_total") == cores[0].num_preemptions > 0
    # Of those who were preempted, too, while a step in flight sampled for them.
    assert shown.value("splitserve_time_to_first_token_seconds_count") == 8
    assert shown.value("splitserve_inter_token_latency_seconds_count") == 8 * 39
    assert {metric.name for metric in SCHEDULER_METRICS} <= shown.names
    for pool, num_blocks in (("device", 24), ("host", 16)):
        assert shown.total("splitserve_kv_blocks", executor=address, pool=pool) == num_blocks


async def test_metrics_show_what_is_running_when_a_step_is_held() -> None:
    watch = StepWatch()
    async with stack(FakeExecutor(fault=watch)) as running:
        watch.hold(after=4)
        params = SamplingParams(seed=1, max_tokens=30)
        completing = asyncio.create_task(running.client.complete([1, 2, 3, 4, 5], params))
        await watch.wait_held()
        shown = running.read()
        watch.release()
        await completing

    assert shown.total("splitserve_num_requests_running") == 1
    used = shown.total("splitserve_kv_blocks", pool="device", state="referenced")
    assert used > 0
    assert shown.total("splitserve_kv_cache_usage_ratio", pool="device") == used / 64


async def test_metrics_have_the_pause_of_requests_whose_executor_was_killed() -> None:
    watches = StepWatch(), StepWatch()
    executors = [FakeExecutor(fault=watch) for watch in watches]
    async with stack(*executors) as running:
        for watch in watches:
            watch.hold(after=4)
        params = SamplingParams(seed=1, max_tokens=30)
        completing = [
            asyncio.create_task(running.client.complete([number, 2, 3], params))
            for number in range(4)
        ]
        for watch in watches:
            await watch.wait_held()
        num_lost = running.read().value(
            "splitserve_num_requests_running", executor=executors[0].address
        )
        killing = asyncio.create_task(executors[0].kill())
        await running.scheduler.wait_connected(1)
        for watch in watches:
            watch.release()
        await killing
        await asyncio.gather(*completing)
        shown = running.read()
        await executors[0].start()

    assert num_lost > 0
    assert shown.value("splitserve_executor_changes_total", change="lost") == 1
    assert shown.value("splitserve_recovery_seconds_count") == num_lost


async def test_metrics_count_early_and_late_refusals() -> None:
    async with stack() as running:
        call = running.scheduler.servicer.Generate(api.GenerateRequest(), LocalCall())
        with pytest.raises(DomainError, match="no executor"):
            await anext(call)
        early = running.read()
    async with stack(FakeExecutor()) as running:
        await running.scheduler.cluster.drain(0)
        session = running.scheduler.servicer.Session(submitted(1), LocalCall())
        response = api.SessionResponse.FromString(await anext(session))
        await session.aclose()
        late = running.read()

    refused = "splitserve_requests_refused_total"
    assert early.value(refused, reason="MODEL_NOT_READY") == 1
    assert response.events[0].rejected.reason == "DRAINING"
    # The executor may have come back meanwhile, and is refused for the same reason.
    assert late.value(refused, reason="DRAINING") in (1, 2)


async def submitted(handle: int) -> AsyncIterator[api.SessionRequest]:
    request = api.GenerateRequest(prompt_token_ids=[1, 2, 3])
    yield api.SessionRequest(submit=api.SessionSubmit(handle=handle, request=request))
    await asyncio.Event().wait()
