"""A scheduler process against the stranger executor and client: tokens and finish reasons.

More of the same in `stranger/test_*.py`: refusals, sessions, faults, several executors.
"""

import math

import pytest

from splitserve.scheduler.v1 import scheduler_pb2 as pb
from tests.contract.stranger.client import Completion, Param, request_of
from tests.contract.stranger.columns import read_i32
from tests.contract.stranger.executor import ExecutorConfig, StrangerExecutor
from tests.contract.stranger.process import running_cluster
from tests.contract.stranger.truth import Score, expected_scores, expected_tokens

VOCAB_SIZE = 1000


def make_requests(
    count: int, max_tokens: int = 10, prompt_step: int = 5
) -> list[pb.GenerateRequest]:
    """Requests with distinct prompts; every third is greedy, the others have odd seeds."""
    seeds = [0, 7, -1, 2**63 - 1, -(2**63), 12345, 1]
    return [
        request_of(
            [(17 * number + 3 * i) % VOCAB_SIZE for i in range(1 + prompt_step * number)],
            seed=seeds[number % len(seeds)],
            temperature=0 if number % 3 == 0 else 0.5 + number,
            max_tokens=max_tokens,
        )
        for number in range(count)
    ]


def truth_of(request: pb.GenerateRequest, n: int | None = None) -> list[int]:
    params = request.sampling_params
    return expected_tokens(
        request.prompt_token_ids,
        params.seed,
        params.temperature,
        params.max_tokens if n is None else n,
        VOCAB_SIZE,
    )


def check_all(requests: list[pb.GenerateRequest], completions: list[Completion]) -> None:
    assert [c.tokens for c in completions] == [truth_of(r) for r in requests]
    assert {c.reason for c in completions} == {"LENGTH"}


@pytest.mark.parametrize("pipeline_depth", [1, 2, 3])
async def test_generate_streams_expected_tokens_when_requests_run_together(
    pipeline_depth: int,
) -> None:
    executor = StrangerExecutor()
    async with running_cluster(executor, pipeline_depth=pipeline_depth) as cluster:
        requests = make_requests(8)
        check_all(requests, await cluster.client.generate_all(requests))
        await cluster.wait_idle()
        cluster.check_contract()
        assert executor.max_num_inflight <= pipeline_depth


async def test_generate_keeps_credit_when_pipeline_is_deeper() -> None:
    executor = StrangerExecutor(ExecutorConfig(max_inflight_steps=1))
    async with running_cluster(executor, pipeline_depth=3) as cluster:
        requests = make_requests(4)
        check_all(requests, await cluster.client.generate_all(requests))
        cluster.check_contract()
        assert executor.max_num_inflight == 1


async def test_generate_uses_sampled_tokens_when_pipeline_is_filled() -> None:
    executor = StrangerExecutor()
    async with running_cluster(executor, pipeline_depth=3) as cluster:
        requests = make_requests(1, max_tokens=20)
        executor.gate.clear()
        generation = cluster.client.start(requests[0])
        await executor.wait_until(lambda: len(executor.batches) >= 1)
        executor.gate.set()
        check_all(requests, [await generation.finish()])
        steps_back = {
            back
            for batch in executor.batches
            for back in read_i32(batch.work.sampled_steps_back, "")
        }
        assert 1 in steps_back


@pytest.mark.parametrize("pipeline_depth", [1, 3])
async def test_generate_streams_expected_tokens_when_prompts_are_chunked(
    pipeline_depth: int,
) -> None:
    executor = StrangerExecutor()
    async with running_cluster(
        executor, max_num_batched_tokens=7, pipeline_depth=pipeline_depth
    ) as cluster:
        requests = make_requests(5, prompt_step=8)
        check_all(requests, await cluster.client.generate_all(requests))
        cluster.check_contract()
        sizes = [sum(read_i32(b.work.num_new_tokens, "")) for b in executor.batches]
        assert max(sizes) <= 7


async def test_generate_keeps_limits_when_executor_allows_less() -> None:
    executor = StrangerExecutor(ExecutorConfig(max_num_rows=2, max_num_batched_tokens=5))
    async with running_cluster(executor) as cluster:
        requests = make_requests(5)
        check_all(requests, await cluster.client.generate_all(requests))
        cluster.check_contract()


@pytest.mark.parametrize("pipeline_depth", [1, 2, 3])
@pytest.mark.parametrize("num_host_blocks", [0, 8])
async def test_generate_streams_expected_tokens_when_pool_forces_preemption(
    num_host_blocks: int, pipeline_depth: int
) -> None:
    executor = StrangerExecutor(
        ExecutorConfig(num_device_blocks=12, num_host_blocks=num_host_blocks)
    )
    async with running_cluster(executor, pipeline_depth=pipeline_depth) as cluster:
        requests = make_requests(6, max_tokens=22, prompt_step=3)
        completions = await cluster.client.generate_all(requests)
        check_all(requests, completions)
        assert sum(c.finish.usage.num_preemptions for c in completions if c.finish) > 0
        await cluster.wait_idle()
        cluster.check_contract()


async def test_generate_streams_expected_tokens_when_prompts_share_prefixes() -> None:
    executor = StrangerExecutor(ExecutorConfig(num_device_blocks=40))
    async with running_cluster(executor, max_num_batched_tokens=64) as cluster:
        prompt = [5 * i % 97 for i in range(33)]
        requests = [
            request_of([*prompt[: 33 - i], 900 + i], seed=i, temperature=1, max_tokens=8)
            for i in range(8)
        ]
        for _ in range(2):
            check_all(requests, await cluster.client.generate_all(requests))
        await cluster.wait_idle()
        cluster.check_contract()


async def test_generate_counts_usage_when_prompt_was_seen_before() -> None:
    async with running_cluster(StrangerExecutor()) as cluster:
        request = request_of(range(30), temperature=0, max_tokens=6)
        first = await cluster.client.generate(request)
        second = await cluster.client.generate(request)
        assert first.finish is not None
        assert second.finish is not None
        assert first.finish.usage == pb.Usage(num_prompt_tokens=30, num_output_tokens=6)
        assert second.finish.usage.num_cached_tokens < 30
        assert first.tokens == second.tokens == truth_of(request)


async def test_generate_stops_at_eos_when_it_is_sampled() -> None:
    request = request_of([1, 2, 3], temperature=0, max_tokens=9)
    truth = truth_of(request)
    executor = StrangerExecutor(ExecutorConfig(eos_token_ids=(truth[4],)))
    async with running_cluster(executor, pipeline_depth=3) as cluster:
        stopped = await cluster.client.generate(request)
        request.sampling_params.ignore_eos = True
        ignored = await cluster.client.generate(request)
        request.sampling_params.stop_token_ids.append(truth[6])
        extra = await cluster.client.generate(request)
        await cluster.wait_idle()
    assert (stopped.tokens, stopped.reason) == (truth[:5], "STOP")
    assert stopped.finish is not None
    assert stopped.finish.stop_token_id == truth[4]
    assert (ignored.tokens, ignored.reason) == (truth, "LENGTH")
    assert ignored.finish is not None
    assert not ignored.finish.HasField("stop_token_id")
    assert (extra.tokens, extra.reason) == (truth[:7], "STOP")


async def test_generate_finishes_when_model_length_is_reached() -> None:
    executor = StrangerExecutor(ExecutorConfig(max_model_len=24))
    async with running_cluster(executor, pipeline_depth=3) as cluster:
        request = request_of(range(20), temperature=0)
        completion = await cluster.client.generate(request)
        longest = await cluster.client.generate(request_of(range(23), temperature=0))
        cluster.check_contract()
    assert (completion.tokens, completion.reason) == (truth_of(request, 4), "MODEL_LENGTH")
    assert (len(longest.tokens), longest.reason) == (1, "MODEL_LENGTH")


async def test_generate_finishes_when_scheduler_allows_less_than_model() -> None:
    async with running_cluster(StrangerExecutor(), max_model_len=16) as cluster:
        completion = await cluster.client.generate(
            request_of(range(10), temperature=0, max_tokens=50)
        )
        model = await cluster.client.get_model()
    assert (len(completion.tokens), completion.reason) == (6, "MODEL_LENGTH")
    assert model.max_model_len_tokens == 16


def _scores(logprobs: list[pb.TokenLogprob]) -> list[Score]:
    return [
        Score(one.token_id, one.logprob, one.rank, tuple((t.token_id, t.logprob) for t in one.top))
        for one in logprobs
    ]


async def test_generate_returns_logprobs_when_asked() -> None:
    executor = StrangerExecutor(ExecutorConfig(num_device_blocks=40))
    async with running_cluster(executor, max_num_batched_tokens=7) as cluster:
        prompt = list(range(40, 60))
        request = request_of(prompt, temperature=0, max_tokens=5, num_logprobs=2)
        request.sampling_params.num_prompt_logprobs = 3
        completions = [await cluster.client.generate(request) for _ in range(2)]
        cluster.check_contract()
    sequence = prompt + truth_of(request)
    for completion in completions:
        assert completion.tokens == truth_of(request)
        assert _scores(completion.logprobs) == expected_scores(sequence, 20, 2, VOCAB_SIZE)
        assert _scores(completion.prompt_logprobs) == expected_scores(prompt, 1, 3, VOCAB_SIZE)


async def test_generate_returns_logprobs_once_when_preempted() -> None:
    executor = StrangerExecutor(ExecutorConfig(num_device_blocks=12))
    async with running_cluster(executor) as cluster:
        requests = make_requests(5, max_tokens=20, prompt_step=3)
        for request in requests:
            request.sampling_params.num_logprobs = 0
            request.sampling_params.num_prompt_logprobs = 1
        completions = await cluster.client.generate_all(requests)
        check_all(requests, completions)
        cluster.check_contract()
    for request, completion in zip(requests, completions, strict=True):
        prompt = list(request.prompt_token_ids)
        sequence = prompt + truth_of(request)
        assert _scores(completion.logprobs) == expected_scores(sequence, len(prompt), 0, VOCAB_SIZE)
        assert _scores(completion.prompt_logprobs) == expected_scores(prompt, 1, 1, VOCAB_SIZE)


async def test_generate_passes_params_on_when_features_are_announced() -> None:
    executor = StrangerExecutor(ExecutorConfig(eos_token_ids=(3,)))
    async with running_cluster(executor) as cluster:
        request = request_of(
            range(10, 20),
            temperature=0.7,
            seed=3,
            max_tokens=6,
            min_tokens=2,
            stop_token_ids=[4],
            repetition_penalty=1.5,
            logit_bias={5: 1.5},
        )
        completion = await cluster.client.generate(request)
        cluster.check_contract()
        sent = [p for b in executor.batches for p in b.new_rows.sampling_params]
    assert completion.tokens == truth_of(request)
    assert sorted(sent[0].suppressed_token_ids) == [3, 4]
    assert (sent[0].min_tokens, dict(sent[0].logit_bias)) == (2, {5: 1.5})


async def test_generate_keeps_to_constraints_when_features_are_announced() -> None:
    executor = StrangerExecutor(ExecutorConfig(eos_token_ids=(3,)))
    free = request_of(range(10, 20), temperature=0.7, seed=3, max_tokens=6)
    first, second = truth_of(free)[:2]
    async with running_cluster(executor) as cluster:
        completions = await cluster.client.generate_all(
            [
                constrained(free, allowed_token_ids=[8]),
                constrained(free, bad_words_token_ids=words([first, second], [3])),
                constrained(free, bad_words_token_ids=words([18, 19, first], [first, second, 5])),
                constrained(free, logit_bias={first: -math.inf, 3: 1.0}),
                constrained(free, allowed_token_ids=[8, 3], bad_words_token_ids=words([8, 8], [3])),
            ]
        )
        await cluster.wait_idle()
        cluster.check_contract()
        sent = [p for b in executor.batches for p in b.new_rows.sampling_params]
    tokens = [completion.tokens for completion in completions]
    assert tokens[0] == [8] * 6
    assert (tokens[1][0], tokens[1][1]) == (first, second + 1)
    assert tokens[2][0] == first + 1
    assert tokens[3][0] == first + 1
    # The end token is no bad word: only that can come after the first 8.
    assert tokens[4] in ([8, 3], [3])
    assert {c.reason for c in completions[:4]} == {"LENGTH"}
    assert completions[4].reason == "STOP"
    assert all(list(word.token_ids) != [3] for p in sent for word in p.bad_words_token_ids)


def constrained(request: pb.GenerateRequest, **params: Param) -> pb.GenerateRequest:
    copy = pb.GenerateRequest()
    copy.CopyFrom(request)
    copy.sampling_params.MergeFrom(pb.SamplingParams(**params))
    return copy


def words(*sequences: list[int]) -> list[pb.TokenSequence]:
    return [pb.TokenSequence(token_ids=tokens) for tokens in sequences]


async def test_resume_continues_identically_when_stream_was_cut() -> None:
    async with running_cluster(StrangerExecutor()) as cluster:
        request = request_of(range(9), "cut", temperature=1, seed=99, max_tokens=12)
        generation = cluster.client.start(request)
        received = list((await generation.read_until(4)).tokens)
        generation.cancel()
        rest = await cluster.client.resume(request, received)
        cluster.check_contract()
    assert received + rest.tokens == truth_of(request)
    assert rest.reason == "LENGTH"
    assert rest.finish is not None
    assert rest.finish.usage.num_output_tokens == 12
    assert rest.finish.usage.num_prompt_tokens == 9
