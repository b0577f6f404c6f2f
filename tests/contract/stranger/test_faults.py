"""Executors that fail in the middle of streams: tokens stay exact, nothing lost or doubled."""

from typing import Literal

import pytest

from splitserve.scheduler.v1 import scheduler_pb2 as pb
from tests.contract.stranger.client import Completion, request_of
from tests.contract.stranger.engine import StepFaults
from tests.contract.stranger.executor import (
    ExecutorConfig,
    StrangerExecutor,
    StreamFaults,
    expected_tokens,
)
from tests.contract.stranger.process import Driver, running_cluster

pytestmark = pytest.mark.cases(3)

NUM_TOKENS = 24
UndefinedReads = Literal["garbage", "invalid_logits"]


def make_requests(count: int = 5, length: int = 7) -> list[pb.GenerateRequest]:
    return [
        request_of(
            [(31 * number + i) % 1000 for i in range(2 + length * number)],
            seed=number,
            temperature=number % 2,
            max_tokens=NUM_TOKENS,
        )
        for number in range(count)
    ]


def truth_of(request: pb.GenerateRequest) -> list[int]:
    params = request.sampling_params
    return expected_tokens(
        request.prompt_token_ids, params.seed, params.temperature, params.max_tokens, 1000
    )


async def check_exact(cluster: Driver, requests: list[pb.GenerateRequest]) -> list[Completion]:
    """Streams `requests` through the fault of the only executor."""
    (executor,) = cluster.executors
    completions = await cluster.client.generate_all(requests)
    assert [c.tokens for c in completions] == [truth_of(request) for request in requests]
    assert {c.reason for c in completions} == {"LENGTH"}
    assert not executor.faults_left, "the fault never happened"
    await cluster.wait_idle()
    cluster.check_contract()
    return completions


@pytest.mark.parametrize("pipeline_depth", [1, 3])
@pytest.mark.parametrize("step_id", [2, 6, 15])
async def test_streams_stay_exact_when_executor_needs_snapshot(
    step_id: int, pipeline_depth: int
) -> None:
    executor = StrangerExecutor(step_faults=StepFaults(need_snapshot_at=step_id))
    async with running_cluster(
        executor, pipeline_depth=pipeline_depth, max_num_batched_tokens=16
    ) as cluster:
        await check_exact(cluster, make_requests())


@pytest.mark.parametrize("undefined_reads", ["garbage", "invalid_logits"])
@pytest.mark.parametrize(("step_id", "pipeline_depth"), [(1, 2), (6, 1), (6, 3), (15, 3)])
async def test_streams_stay_exact_when_step_fails(
    step_id: int, pipeline_depth: int, undefined_reads: UndefinedReads
) -> None:
    faults = StepFaults(fail_step_at=step_id, undefined_reads=undefined_reads)
    async with running_cluster(
        StrangerExecutor(step_faults=faults),
        pipeline_depth=pipeline_depth,
        max_num_batched_tokens=16,
    ) as cluster:
        await check_exact(cluster, make_requests())


@pytest.mark.parametrize("undefined_reads", ["garbage", "invalid_logits"])
async def test_streams_stay_exact_when_step_fails_in_a_swapping_pool(
    undefined_reads: UndefinedReads,
) -> None:
    faults = StepFaults(fail_step_at=20, undefined_reads=undefined_reads)
    config = ExecutorConfig(num_device_blocks=14, num_host_blocks=8)
    executor = StrangerExecutor(config, step_faults=faults)
    async with running_cluster(executor, pipeline_depth=2) as cluster:
        await check_exact(cluster, make_requests(5, length=3))


@pytest.mark.parametrize("pipeline_depth", [1, 3])
@pytest.mark.parametrize("step_id", [1, 3, 12])
async def test_others_stay_exact_when_one_row_fails(step_id: int, pipeline_depth: int) -> None:
    faults = StepFaults(fail_row_at=step_id)
    async with running_cluster(
        StrangerExecutor(step_faults=faults),
        pipeline_depth=pipeline_depth,
        max_num_batched_tokens=16,
    ) as cluster:
        requests = make_requests()
        completions = await cluster.client.generate_all(requests)
        await cluster.wait_idle()
        cluster.check_contract()
    failed = [c for c in completions if c.reason == "ERROR"]
    assert [c.finish.error.reason for c in failed if c.finish] == ["ROW_FAILED"]
    for request, completion in zip(requests, completions, strict=True):
        truth = truth_of(request)
        if completion in failed:
            truth = truth[: len(completion.tokens)]
        assert completion.tokens == truth


@pytest.mark.parametrize("undefined_reads", ["garbage", "invalid_logits"])
async def test_others_stay_exact_when_failed_row_shares_its_prefix(
    undefined_reads: UndefinedReads,
) -> None:
    faults = StepFaults(fail_row_at=1, undefined_reads=undefined_reads)
    executor = StrangerExecutor(step_faults=faults)
    async with running_cluster(executor, max_num_batched_tokens=16) as cluster:
        requests = [
            request_of([*range(40), number], temperature=0, max_tokens=NUM_TOKENS)
            for number in range(4)
        ]
        executor.gate.clear()
        generations = [cluster.client.start(request) for request in requests]
        await cluster.wait_for_states(
            lambda s: s[0].num_running_requests + s[0].num_waiting_requests == 4
        )
        executor.gate.set()
        completions = [await generation.finish() for generation in generations]
        cluster.check_contract()
    good = [
        (c.tokens, truth_of(r))
        for c, r in zip(completions, requests, strict=True)
        if c.reason == "LENGTH"
    ]
    assert [tokens for tokens, _ in good] == [truth for _, truth in good]
    assert len(good) == 3


@pytest.mark.parametrize("pipeline_depth", [1, 3])
@pytest.mark.parametrize("step_id", [1, 7])
@pytest.mark.parametrize("fault", ["cut_at", "lose_at"])
async def test_streams_stay_exact_when_execute_stream_is_cut(
    fault: str, step_id: int, pipeline_depth: int
) -> None:
    executor = StrangerExecutor(stream_faults=StreamFaults(**{fault: step_id}))
    async with running_cluster(
        executor, pipeline_depth=pipeline_depth, max_num_batched_tokens=16
    ) as cluster:
        completions = await check_exact(cluster, make_requests())
    assert all(c.finish.usage.num_preemptions == 0 for c in completions if c.finish)


@pytest.mark.parametrize("step_id", [1, 7, 20])
async def test_streams_stay_exact_when_executor_restarts(step_id: int) -> None:
    executor = StrangerExecutor(stream_faults=StreamFaults(restart_at=step_id))
    async with running_cluster(executor, pipeline_depth=3, max_num_batched_tokens=16) as cluster:
        await check_exact(cluster, make_requests())


async def test_logprobs_stay_exact_when_step_fails() -> None:
    executor = StrangerExecutor(step_faults=StepFaults(fail_step_at=4))
    async with running_cluster(executor, pipeline_depth=2, max_num_batched_tokens=16) as cluster:
        requests = make_requests(3)
        for request in requests:
            request.sampling_params.num_logprobs = 1
            request.sampling_params.num_prompt_logprobs = 0
        completions = await check_exact(cluster, requests)
    for request, completion in zip(requests, completions, strict=True):
        prompt = list(request.prompt_token_ids)
        assert [one.token_id for one in completion.prompt_logprobs] == prompt[1:]
        assert [one.token_id for one in completion.logprobs] == completion.tokens


async def test_request_survives_when_two_executors_lose_one() -> None:
    executors = [StrangerExecutor(), StrangerExecutor()]
    async with running_cluster(*executors, reconnect_timeout_s=0.1) as cluster:
        requests = make_requests(6)
        for executor in executors:
            executor.gate.clear()
        generations = [cluster.client.start(request) for request in requests]
        await cluster.wait_for_states(lambda states: all(s.num_running_requests for s in states))
        for executor in executors:
            executor.gate.set()
        for generation in generations:
            await generation.read_until(2)
        await executors[0].stop()
        completions = [await generation.finish() for generation in generations]
        assert [c.tokens for c in completions] == [truth_of(request) for request in requests]
        await cluster.wait_idle()
        cluster.check_contract()


async def test_request_waits_when_only_executor_is_away() -> None:
    executor = StrangerExecutor()
    async with running_cluster(executor, reconnect_timeout_s=0) as cluster:
        await executor.stop()
        await cluster.wait_for_states(lambda states: not any(s.connected for s in states))
        request = make_requests(1)[0]
        generation = cluster.client.start(request)
        await executor.start(cluster.scheduler.address)
        assert (await generation.finish()).tokens == truth_of(request)
        cluster.check_contract()
