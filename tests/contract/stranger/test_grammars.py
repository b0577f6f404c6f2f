"""Grammars over executors written from the contract alone, each row of which has to ask twice."""

import asyncio

import grpc
import pytest

from splitserve.executor.v1 import executor_pb2
from splitserve.scheduler.v1 import scheduler_pb2 as pb
from tests.contract.stranger.client import request_of
from tests.contract.stranger.engine import StepFaults
from tests.contract.stranger.executor import (
    SAMPLING_FEATURES,
    ExecutorConfig,
    StrangerExecutor,
    StreamFaults,
    expected_tokens,
)
from tests.contract.stranger.grammars import INVALID
from tests.contract.stranger.process import running_cluster

EOS = 1
FEATURES = (*SAMPLING_FEATURES, executor_pb2.FEATURE_GRAMMAR)
PROMPT = [7, 8, 9, 10, 11]


def choice(*tokens: int) -> pb.Grammar:
    return pb.Grammar(choices=pb.Choices(texts=[" ".join(map(str, tokens))]))


def output_of(number: int) -> list[int]:
    return [(31 * number + i) % 1000 + 2 for i in range(3 + 4 * number)]


@pytest.mark.parametrize(
    ("step_faults", "stream_faults", "num_device_blocks"),
    [
        (StepFaults(), StreamFaults(), 14),
        (StepFaults(need_snapshot_at=6), StreamFaults(), 256),
        (StepFaults(fail_step_at=7), StreamFaults(), 256),
        (StepFaults(), StreamFaults(cut_at=8), 256),
    ],
    ids=["few blocks", "snapshot", "failed step", "cut"],
)
async def test_outputs_are_those_of_the_grammars_whatever_happens(
    step_faults: StepFaults, stream_faults: StreamFaults, num_device_blocks: int
) -> None:
    config = ExecutorConfig(
        features=FEATURES, eos_token_ids=(EOS,), num_device_blocks=num_device_blocks
    )
    executor = StrangerExecutor(config, step_faults=step_faults, stream_faults=stream_faults)
    requests = [
        request_of(PROMPT * (1 + number % 2), seed=number, grammar=choice(*output_of(number)))
        for number in range(5)
    ]
    requests.append(request_of(PROMPT, seed=3, max_tokens=9, ignore_eos=True))
    async with running_cluster(executor, pipeline_depth=3) as cluster:
        completions = await cluster.client.generate_all(requests)
        await cluster.wait_idle()
        cluster.check_contract()
    outputs = [[*output_of(number), EOS] for number in range(5)]
    outputs.append(expected_tokens(PROMPT, 3, 1, 9, 1000))
    assert [completion.tokens for completion in completions] == outputs
    assert [completion.reason for completion in completions] == ["STOP"] * 5 + ["LENGTH"]


async def test_invalid_grammar_ends_its_request_alone() -> None:
    config = ExecutorConfig(features=FEATURES, eos_token_ids=(EOS,))
    bad = request_of(PROMPT, grammar=pb.Grammar(choices=pb.Choices(texts=[INVALID])))
    good = request_of(PROMPT, grammar=choice(4, 5, 6))
    async with running_cluster(StrangerExecutor(config)) as cluster:
        generations = [cluster.client.start(request) for request in (good, bad, good)]
        completions = await asyncio.gather(*(one.finish() for one in generations))
        await cluster.wait_idle()
        cluster.check_contract()
    assert [c.tokens for c in completions] == [[4, 5, 6, EOS], [], [4, 5, 6, EOS]]
    finish = completions[1].finish
    assert finish is not None
    assert finish.error.reason == "GRAMMAR_INVALID"


async def test_large_grammar_is_refused_when_executors_read_little() -> None:
    config = ExecutorConfig(features=FEATURES, eos_token_ids=(EOS,), max_message_bytes=65536)
    large = request_of(PROMPT, grammar=pb.Grammar(lark="x" * 65536))
    async with running_cluster(StrangerExecutor(config)) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="bytes"):
            await cluster.client.generate(large)
        assert (await cluster.client.generate(request_of(PROMPT, max_tokens=2))).reason == "LENGTH"
        cluster.check_contract()
