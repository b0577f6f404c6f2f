"""Step numbers, message sizes, extreme sizes; schedulers that come and go."""

import grpc
import pytest

from splitserve.scheduler.v1 import scheduler_pb2 as pb
from tests.contract.stranger.client import StrangerClient, request_of
from tests.contract.stranger.executor import ExecutorConfig, StrangerExecutor, expected_tokens
from tests.contract.stranger.process import running_cluster, running_scheduler
from tests.support.processes.addresses import reserve_address
from tests.support.processes.patience import PATIENCE_S


def make_requests(count: int, num_tokens: int = 8, length: int = 6) -> list[pb.GenerateRequest]:
    return [
        request_of(
            [(13 * number + i) % 1000 for i in range(1 + length * number)],
            seed=number,
            temperature=number % 2,
            max_tokens=num_tokens,
        )
        for number in range(count)
    ]


def truth_of(request: pb.GenerateRequest) -> list[int]:
    params = request.sampling_params
    return expected_tokens(
        request.prompt_token_ids, params.seed, params.temperature, params.max_tokens, 1000
    )


async def test_steps_are_numbered_one_by_one_when_nothing_fails() -> None:
    executor = StrangerExecutor()
    async with running_cluster(executor, pipeline_depth=3) as cluster:
        await cluster.client.generate_all(make_requests(4))
        await cluster.client.generate_all(make_requests(4))
    assert [b.step_id for b in executor.batches] == list(range(1, len(executor.batches) + 1))
    bases = [b.base_step_id if b.HasField("base_step_id") else None for b in executor.batches]
    assert bases[0] is None
    assert all(
        base in (None, batch.step_id - 1)
        for base, batch in zip(bases, executor.batches, strict=True)
    )


async def test_batches_keep_max_message_bytes_when_prompts_are_long() -> None:
    config = ExecutorConfig(
        max_message_bytes=65536,
        max_num_batched_tokens=1 << 20,
        max_model_len=20_000,
        num_device_blocks=1 << 15,
    )
    executor = StrangerExecutor(config)
    async with running_cluster(executor) as cluster:
        requests = make_requests(6, length=3000)
        generations = [cluster.client.start(request, timeout_s=PATIENCE_S) for request in requests]
        completions = [await generation.finish() for generation in generations]
        cluster.check_contract()
    assert [c.tokens for c in completions] == [truth_of(request) for request in requests]
    assert max(batch.ByteSize() for batch in executor.batches) <= 65536


@pytest.mark.parametrize(
    "config",
    [
        ExecutorConfig(block_size=1, num_device_blocks=80),
        ExecutorConfig(block_size=16, num_device_blocks=5),
        ExecutorConfig(max_num_rows=1),
        ExecutorConfig(max_num_batched_tokens=1),
        ExecutorConfig(num_device_blocks=8, num_host_blocks=1),
        ExecutorConfig(num_device_blocks=8, max_num_batched_tokens=3, max_num_rows=3),
    ],
    ids=["block_of_1", "block_of_16", "one_row", "one_token", "one_host_block", "all_tiny"],
)
async def test_generate_streams_expected_tokens_when_sizes_are_extreme(
    config: ExecutorConfig,
) -> None:
    async with running_cluster(StrangerExecutor(config), pipeline_depth=3) as cluster:
        requests = make_requests(4)
        completions = await cluster.client.generate_all(requests)
        assert [c.tokens for c in completions] == [truth_of(request) for request in requests]
        await cluster.wait_idle()
        cluster.check_contract()


async def test_executor_serves_next_scheduler_when_first_is_gone() -> None:
    address = reserve_address()
    executor = StrangerExecutor(ExecutorConfig(register_interval_s=0.1))
    requests = make_requests(4)
    try:
        for life in range(2):
            async with (
                running_scheduler(listen=address) as scheduler,
                grpc.aio.insecure_channel(scheduler.address) as channel,
            ):
                if life == 0:
                    await executor.start(address)
                await executor.wait_for_stream()
                completions = await StrangerClient(channel).generate_all(requests)
                assert [c.tokens for c in completions] == [truth_of(r) for r in requests]
            await executor.wait_until(lambda: executor.num_streams == 0)
    finally:
        await executor.close()
    assert executor.violations == []


async def test_streams_resume_elsewhere_when_scheduler_dies() -> None:
    executor = StrangerExecutor()
    request = make_requests(4, num_tokens=30)[3]
    async with running_cluster(executor) as cluster:
        generation = cluster.client.start(request)
        await generation.read_until(5)
        executor.gate.clear()
        cluster.scheduler.process.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await generation.finish()
        received = list(generation.completion.tokens)
        executor.gate.set()
    async with running_cluster(StrangerExecutor()) as cluster:
        rest = await cluster.client.resume(request, received)
    assert received + rest.tokens == truth_of(request)
