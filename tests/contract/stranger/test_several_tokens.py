"""Several tokens of a row in one step, by an executor that takes as many as it likes."""

import pytest

from splitserve.executor.v1 import executor_pb2 as executor_pb
from tests.contract.stranger.client import request_of
from tests.contract.stranger.executor import ALL_SAMPLING, ExecutorConfig, StrangerExecutor
from tests.contract.stranger.process import running_cluster
from tests.contract.stranger.truth import expected_tokens

VOCAB_SIZE = 1000
NUM_TOKENS = 40


def prompt(number: int) -> list[int]:
    return [(17 * number + 3 * i) % VOCAB_SIZE for i in range(3 + 5 * number)]


@pytest.mark.parametrize("pipeline_depth", [1, 2, 3])
async def test_tokens_are_expected_when_rows_run_ahead(pipeline_depth: int) -> None:
    executor = StrangerExecutor(ExecutorConfig(features=ALL_SAMPLING))
    async with running_cluster(executor, pipeline_depth=pipeline_depth, max_run_ahead=6) as cluster:
        requests = [
            request_of(prompt(n), seed=n, temperature=n % 2, max_tokens=NUM_TOKENS)
            for n in range(4)
        ]
        completions = await cluster.client.generate_all(requests)
        truth = [expected_tokens(prompt(n), n, n % 2, NUM_TOKENS, VOCAB_SIZE) for n in range(4)]
        assert [completion.tokens for completion in completions] == truth
        assert executor.engine.num_tokens_more > NUM_TOKENS
        # A token that ends a sequence does so in the middle of a run.
        stop = next(
            token for i, token in enumerate(truth[1]) if i > 8 and token not in truth[1][:i]
        )
        one = request_of(
            prompt(1), seed=1, temperature=1, max_tokens=NUM_TOKENS, stop_token_ids=[stop]
        )
        (completion,) = await cluster.client.generate_all([one])
        assert completion.tokens == truth[1][: truth[1].index(stop) + 1]
        assert completion.reason == "STOP"
        await cluster.wait_idle()
        cluster.check_contract()


async def test_scores_are_of_each_token_when_rows_run_ahead() -> None:
    executor = StrangerExecutor(ExecutorConfig(features=ALL_SAMPLING))
    async with running_cluster(executor, max_run_ahead=6) as cluster:
        request = request_of(
            prompt(2), seed=2, temperature=1, max_tokens=NUM_TOKENS, num_logprobs=2
        )
        (completion,) = await cluster.client.generate_all([request])
        assert completion.tokens == expected_tokens(prompt(2), 2, 1, NUM_TOKENS, VOCAB_SIZE)
        assert [score.token_id for score in completion.logprobs] == completion.tokens
        assert executor.engine.num_tokens_more > 0
        await cluster.wait_idle()
        cluster.check_contract()


async def test_executor_is_told_nothing_new_when_it_does_not_announce_the_feature() -> None:
    executor = StrangerExecutor()
    assert executor_pb.FEATURE_SEVERAL_TOKENS not in executor.config.features
    async with running_cluster(executor, max_run_ahead=6) as cluster:
        request = request_of(prompt(2), seed=2, temperature=1, max_tokens=9)
        (completion,) = await cluster.client.generate_all([request])
        assert completion.tokens == expected_tokens(prompt(2), 2, 1, 9, VOCAB_SIZE)
        assert executor.engine.num_tokens_more == 0
        await cluster.wait_idle()
        cluster.check_contract()
