"""A scheduler process against an executor and a client that were written from the protos alone.

More in `stranger/test_*.py`: refusals, registration, sessions, and the executor itself.
"""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from splitserve.executor.v1 import executor_pb2
from splitserve.scheduler.v1 import scheduler_pb2 as pb
from tests.contract.stranger.client import Completion, Param, request_of
from tests.contract.stranger.columns import read_i32
from tests.contract.stranger.constraints import INVALID
from tests.contract.stranger.engine import Faults
from tests.contract.stranger.executor import (
    ALL_SAMPLING,
    SAMPLING_FEATURES,
    ExecutorConfig,
    StrangerExecutor,
)
from tests.contract.stranger.process import make_requests, running_cluster, truth_of
from tests.contract.stranger.truth import Score, expected_scores

DEFAULT = ExecutorConfig()
READS = ("garbage", "invalid_logits")


@dataclass(frozen=True, slots=True)
class Scenario:
    """What an executor announces and fails at, options of the scheduler, and requests.

    `requests`: number, max_tokens, and by how much each prompt is longer than the one before.
    `is_preempted`: whether any request is, None for either.
    """

    name: str
    config: ExecutorConfig = DEFAULT
    options: dict[str, int] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)
    requests: tuple[int, int, int] = (5, 10, 5)
    is_preempted: bool | None = None


def name_of(scenario: Scenario) -> str:
    return scenario.name


def num_preemptions(completions: list[Completion]) -> int:
    return sum(c.finish.usage.num_preemptions for c in completions if c.finish)


# -- sizes -----------------------------------------------------------------------------------------

DEPTHS = [{"pipeline_depth": depth} for depth in (1, 2, 3)]
EXTREMES = {
    "blocks of 1": ExecutorConfig(block_size=1, num_device_blocks=80),
    "blocks of 16": ExecutorConfig(block_size=16, num_device_blocks=5),
    "one row": ExecutorConfig(max_num_rows=1),
    "one token": ExecutorConfig(max_num_batched_tokens=1),
    "one host block": ExecutorConfig(num_device_blocks=8, num_host_blocks=1),
    "all tiny": ExecutorConfig(num_device_blocks=8, max_num_batched_tokens=3, max_num_rows=3),
    "few rows": ExecutorConfig(max_num_rows=2, max_num_batched_tokens=5),
    "one step in flight": ExecutorConfig(max_inflight_steps=1),
}
LONG = ExecutorConfig(
    max_num_batched_tokens=1 << 20, max_model_len=20_000, num_device_blocks=1 << 15
)
SCENARIOS = [
    *(Scenario("together", options=depth, requests=(8, 10, 5)) for depth in DEPTHS),
    *(
        Scenario("in chunks", options={**depth, "max_num_batched_tokens": 7}, requests=(5, 10, 8))
        for depth in (DEPTHS[0], DEPTHS[2])
    ),
    *(Scenario(name, config, DEPTHS[2], requests=(4, 8, 6)) for name, config in EXTREMES.items()),
    Scenario("long prompts", LONG, requests=(6, 8, 3000)),
    *(
        Scenario(
            f"preempted, {num_host} host blocks",
            ExecutorConfig(num_device_blocks=12, num_host_blocks=num_host),
            depth,
            requests=(6, 22, 3),
            is_preempted=True,
        )
        for num_host in (0, 8)
        for depth in DEPTHS
    ),
    *(
        Scenario(
            "run ahead",
            ExecutorConfig(features=ALL_SAMPLING),
            {**depth, "max_run_ahead": 6},
            requests=(4, 40, 5),
        )
        for depth in DEPTHS
    ),
    Scenario("run ahead, not announced", options={"max_run_ahead": 6}),
]


@pytest.mark.cases(10)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_of)
async def test_streams_are_exact_whatever_the_sizes(scenario: Scenario) -> None:
    config, options = scenario.config, scenario.options
    executor = StrangerExecutor(config)
    async with running_cluster(executor, **options) as cluster:
        completions = await cluster.check_exact(make_requests(*scenario.requests))
    if scenario.is_preempted:
        assert num_preemptions(completions) > 0
    batches = executor.batches
    assert executor.max_num_inflight <= min(
        options.get("pipeline_depth", config.max_inflight_steps), config.max_inflight_steps
    )
    num_tokens = [sum(read_i32(batch.work.num_new_tokens, "")) for batch in batches]
    assert max(num_tokens) <= options.get("max_num_batched_tokens", config.max_num_batched_tokens)
    assert max(batch.ByteSize() for batch in batches) <= config.max_message_bytes
    assert [batch.step_id for batch in batches] == list(range(1, len(batches) + 1))
    bases = [b.base_step_id if b.HasField("base_step_id") else None for b in batches]
    assert bases[0] is None
    assert all(base in (None, step_id) for step_id, base in enumerate(bases))
    is_announced = executor_pb2.FEATURE_SEVERAL_TOKENS in config.features
    assert (executor.engine.num_tokens_more > 40) == is_announced


async def test_steps_use_tokens_in_flight_when_the_pipeline_is_filled() -> None:
    executor = StrangerExecutor()
    async with running_cluster(executor, pipeline_depth=3) as cluster:
        executor.gate.clear()
        [request] = make_requests(1, max_tokens=20)
        generation = cluster.client.start(request)
        await executor.wait_until(lambda: len(executor.batches) >= 1)
        executor.gate.set()
        assert (await generation.finish()).tokens == truth_of(request)
    backs = [read_i32(batch.work.sampled_steps_back, "") for batch in executor.batches]
    assert any(1 in back for back in backs)


async def test_streams_are_exact_when_prompts_share_prefixes() -> None:
    executor = StrangerExecutor(ExecutorConfig(num_device_blocks=40))
    prompt = [5 * i % 97 for i in range(33)]
    requests = [
        request_of([*prompt[: 33 - i], 900 + i], seed=i, temperature=1, max_tokens=8)
        for i in range(8)
    ]
    async with running_cluster(executor, max_num_batched_tokens=64) as cluster:
        for _ in range(2):
            await cluster.check_exact(requests)


async def test_usage_counts_cached_tokens_when_a_prompt_comes_again() -> None:
    request = request_of(range(30), temperature=0, max_tokens=6)
    async with running_cluster(StrangerExecutor()) as cluster:
        finishes = [(await cluster.check_exact([request]))[0].finish for _ in range(2)]
    usages = [finish.usage for finish in finishes if finish is not None]
    assert usages[0] == pb.Usage(num_prompt_tokens=30, num_output_tokens=6)
    assert 0 < usages[1].num_cached_tokens < 30


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [SAMPLING_FEATURES, ALL_SAMPLING])
async def test_stream_stops_when_an_end_token_is_sampled(
    features: tuple[executor_pb2.Feature, ...],
) -> None:
    request = request_of([1, 2, 3], temperature=0, max_tokens=9)
    truth = truth_of(request)
    executor = StrangerExecutor(ExecutorConfig(eos_token_ids=(truth[4],), features=features))
    async with running_cluster(executor, pipeline_depth=3, max_run_ahead=6) as cluster:
        stopped = await cluster.client.generate(request)
        request.sampling_params.ignore_eos = True
        ignored = await cluster.client.generate(request)
        request.sampling_params.stop_token_ids.append(truth[6])
        extra = await cluster.client.generate(request)
        await cluster.wait_idle()
        cluster.check_contract()
    assert (stopped.tokens, stopped.reason) == (truth[:5], "STOP")
    assert stopped.finish is not None
    assert stopped.finish.stop_token_id == truth[4]
    assert (ignored.tokens, ignored.reason) == (truth, "LENGTH")
    assert ignored.finish is not None
    assert not ignored.finish.HasField("stop_token_id")
    assert (extra.tokens, extra.reason) == (truth[:7], "STOP")


@pytest.mark.parametrize(("max_model_len", "options"), [(24, {}), (200, {"max_model_len": 24})])
async def test_stream_ends_when_the_model_length_is_reached(
    max_model_len: int, options: dict[str, int]
) -> None:
    executor = StrangerExecutor(ExecutorConfig(max_model_len=max_model_len))
    async with running_cluster(executor, pipeline_depth=3, **options) as cluster:
        for num_prompt in (20, 23):
            request = request_of(range(num_prompt), temperature=0)
            completion = await cluster.client.generate(request)
            assert completion.tokens == truth_of(request, 24 - num_prompt)
            assert completion.reason == "MODEL_LENGTH"
        cluster.check_contract()
        assert (await cluster.client.get_model()).max_model_len_tokens == 24


async def test_stream_continues_identically_when_it_is_resumed() -> None:
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


# -- sampling parameters ---------------------------------------------------------------------------

CHUNKS = {"pipeline_depth": 2, "max_num_batched_tokens": 7}
SCORED = [
    Scenario("in chunks, and cached", ExecutorConfig(num_device_blocks=40), CHUNKS),
    Scenario("preempted", ExecutorConfig(num_device_blocks=12), requests=(5, 20, 3)),
    Scenario("run ahead", ExecutorConfig(features=ALL_SAMPLING), {"max_run_ahead": 6}),
    Scenario("failed step", options=CHUNKS, faults={"fail_step_at": 4}, requests=(3, 24, 7)),
]


@pytest.mark.parametrize("scenario", SCORED, ids=name_of)
async def test_logprobs_come_once_for_each_token(scenario: Scenario) -> None:
    executor = StrangerExecutor(scenario.config, Faults(**scenario.faults))
    requests = make_requests(*scenario.requests)
    for request in requests:
        request.sampling_params.num_logprobs = 2
        request.sampling_params.num_prompt_logprobs = 1
    async with running_cluster(executor, **scenario.options) as cluster:
        completions = await cluster.check_exact(requests) + await cluster.check_exact(requests)
    for request, completion in zip(2 * requests, completions, strict=True):
        prompt = list(request.prompt_token_ids)
        sequence = prompt + truth_of(request)
        assert scores_of(completion.logprobs) == expected_scores(sequence, len(prompt), 2)
        assert scores_of(completion.prompt_logprobs) == expected_scores(prompt, 1, 1)


def scores_of(logprobs: list[pb.TokenLogprob]) -> list[Score]:
    return [
        Score(one.token_id, one.logprob, one.rank, tuple((t.token_id, t.logprob) for t in one.top))
        for one in logprobs
    ]


async def test_params_reach_the_executor_when_features_are_announced() -> None:
    executor = StrangerExecutor(ExecutorConfig(eos_token_ids=(3,)))
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
    async with running_cluster(executor) as cluster:
        await cluster.check_exact([request])
    [sent, *_] = [p for b in executor.batches for p in b.new_rows.sampling_params]
    assert sorted(sent.suppressed_token_ids) == [3, 4]
    assert (sent.min_tokens, dict(sent.logit_bias)) == (2, {5: 1.5})


async def test_streams_keep_constraints_when_features_are_announced() -> None:
    executor = StrangerExecutor(ExecutorConfig(eos_token_ids=(3,)))
    free = request_of(range(10, 20), temperature=0.7, seed=3, max_tokens=6)
    first, second = truth_of(free)[:2]
    constraints: list[dict[str, Param]] = [
        {"allowed_token_ids": [8]},
        {"bad_words_token_ids": words([first, second], [3])},
        {"bad_words_token_ids": words([18, 19, first], [first, second, 5])},
        {"logit_bias": {first: -math.inf, 3: 1.0}},
        {"allowed_token_ids": [8, 3], "bad_words_token_ids": words([8, 8], [3])},
    ]
    async with running_cluster(executor) as cluster:
        completions = await cluster.client.generate_all([constrained(free, c) for c in constraints])
        await cluster.wait_idle()
        cluster.check_contract()
    tokens = [completion.tokens for completion in completions]
    assert tokens[0] == [8] * 6
    assert (tokens[1][0], tokens[1][1]) == (first, second + 1)
    assert tokens[2][0] == tokens[3][0] == first + 1
    # The end token is no bad word: only that can come after the first 8.
    assert tokens[4] in ([8, 3], [3])
    assert [c.reason for c in completions] == ["LENGTH"] * 4 + ["STOP"]
    sent = [p for b in executor.batches for p in b.new_rows.sampling_params]
    assert all(list(word.token_ids) != [3] for p in sent for word in p.bad_words_token_ids)


def constrained(request: pb.GenerateRequest, params: dict[str, Param]) -> pb.GenerateRequest:
    copy = pb.GenerateRequest()
    copy.CopyFrom(request)
    copy.sampling_params.MergeFrom(pb.SamplingParams(**params))
    return copy


def words(*sequences: list[int]) -> list[pb.TokenSequence]:
    return [pb.TokenSequence(token_ids=tokens) for tokens in sequences]


# -- grammars: each row has to ask twice -----------------------------------------------------------

EOS = 1
WITH_GRAMMARS = ExecutorConfig(
    features=(*SAMPLING_FEATURES, executor_pb2.FEATURE_GRAMMAR), eos_token_ids=(EOS,)
)
PROMPT = [7, 8, 9, 10, 11]


def choice(*tokens: int) -> pb.Grammar:
    return pb.Grammar(choices=pb.Choices(texts=[" ".join(map(str, tokens))]))


def output_of(number: int) -> list[int]:
    return [(31 * number + i) % 1000 + 2 for i in range(3 + 4 * number)]


@pytest.mark.parametrize(
    ("faults", "num_device_blocks"),
    [({}, 14), ({"need_snapshot_at": 6}, 256), ({"fail_step_at": 7}, 256), ({"cut_at": 8}, 256)],
    ids=str,
)
async def test_outputs_are_those_of_their_grammars(
    faults: dict[str, Any], num_device_blocks: int
) -> None:
    config = ExecutorConfig(
        features=WITH_GRAMMARS.features, eos_token_ids=(EOS,), num_device_blocks=num_device_blocks
    )
    requests = [
        request_of(PROMPT * (1 + number % 2), seed=number, grammar=choice(*output_of(number)))
        for number in range(5)
    ]
    free = request_of(PROMPT, seed=3, temperature=1, max_tokens=9, ignore_eos=True)
    async with running_cluster(StrangerExecutor(config, Faults(**faults)), pipeline_depth=3) as it:
        completions = await it.client.generate_all([*requests, free])
        await it.wait_idle()
        it.check_contract()
    outputs = [[*output_of(number), EOS] for number in range(5)]
    assert [completion.tokens for completion in completions] == [*outputs, truth_of(free)]
    assert [completion.reason for completion in completions] == ["STOP"] * 5 + ["LENGTH"]


async def test_invalid_grammar_ends_its_request_alone() -> None:
    bad = request_of(PROMPT, grammar=pb.Grammar(choices=pb.Choices(texts=[INVALID])))
    good = request_of(PROMPT, grammar=choice(4, 5, 6))
    async with running_cluster(StrangerExecutor(WITH_GRAMMARS)) as cluster:
        completions = await cluster.client.generate_all([good, bad, good])
        await cluster.wait_idle()
        cluster.check_contract()
    assert [c.tokens for c in completions] == [[4, 5, 6, EOS], [], [4, 5, 6, EOS]]
    finish = completions[1].finish
    assert finish is not None
    assert finish.error.reason == "GRAMMAR_INVALID"


async def test_grammar_is_refused_when_it_fits_in_no_message() -> None:
    large = request_of(PROMPT, grammar=pb.Grammar(lark="x" * WITH_GRAMMARS.max_message_bytes))
    async with running_cluster(StrangerExecutor(WITH_GRAMMARS)) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="bytes"):
            await cluster.client.generate(large)
        assert (await cluster.client.generate(request_of(PROMPT, max_tokens=2))).reason == "LENGTH"
        cluster.check_contract()


# -- faults ----------------------------------------------------------------------------------------


def faulty(depth: int, **faults: object) -> Scenario:
    name = ", ".join(f"{name} {value}" for name, value in faults.items())
    options = {"pipeline_depth": depth, "max_num_batched_tokens": 16}
    return Scenario(name, options=options, faults=faults, requests=(5, 24, 7))


SWAPPING = ExecutorConfig(num_device_blocks=14, num_host_blocks=8)
FAULTS = [
    *(faulty(depth, need_snapshot_at=step) for step in (2, 6, 15) for depth in (1, 3)),
    *(
        faulty(depth, fail_step_at=step, undefined_reads=reads)
        for step, depth in ((1, 2), (6, 1), (6, 3), (15, 3))
        for reads in READS
    ),
    *(
        Scenario(
            f"failed step of a swapping pool, {reads}",
            SWAPPING,
            {"pipeline_depth": 2},
            {"fail_step_at": 20, "undefined_reads": reads},
            (5, 24, 3),
        )
        for reads in READS
    ),
    *(faulty(depth, cut_at=step) for step in (1, 7) for depth in (1, 3)),
    *(faulty(depth, lose_at=step) for step in (1, 7) for depth in (1, 3)),
    *(faulty(3, restart_at=step) for step in (1, 7, 20)),
]


@pytest.mark.cases(6)
@pytest.mark.parametrize("scenario", FAULTS, ids=name_of)
async def test_streams_stay_exact_when_the_executor_fails(scenario: Scenario) -> None:
    executor = StrangerExecutor(scenario.config, Faults(**scenario.faults))
    async with running_cluster(executor, **scenario.options) as cluster:
        completions = await cluster.check_exact(make_requests(*scenario.requests))
    assert not executor.faults.are_left, "the fault never happened"
    if {"cut_at", "lose_at"} & scenario.faults.keys():
        assert num_preemptions(completions) == 0


@pytest.mark.cases(3)
@pytest.mark.parametrize("pipeline_depth", [1, 3])
@pytest.mark.parametrize("step_id", [1, 3, 12])
async def test_other_streams_stay_exact_when_one_row_fails(
    step_id: int, pipeline_depth: int
) -> None:
    executor = StrangerExecutor(faults=Faults(fail_row_at=step_id))
    requests = make_requests(5, 24, 7)
    async with running_cluster(
        executor, pipeline_depth=pipeline_depth, max_num_batched_tokens=16
    ) as cluster:
        completions = await cluster.client.generate_all(requests)
        await cluster.wait_idle()
        cluster.check_contract()
    errors = [c.finish.error.reason for c in completions if c.finish and c.reason == "ERROR"]
    assert errors == ["ROW_FAILED"]
    for request, completion in zip(requests, completions, strict=True):
        num_tokens = len(completion.tokens) if completion.reason == "ERROR" else None
        assert completion.tokens == truth_of(request, num_tokens)


@pytest.mark.parametrize("reads", READS)
async def test_streams_stay_exact_when_a_failed_row_shares_their_prefix(reads: Any) -> None:  # noqa: ANN401
    executor = StrangerExecutor(faults=Faults(fail_row_at=1, undefined_reads=reads))
    requests = [
        request_of([*range(40), number], temperature=0, max_tokens=24) for number in range(4)
    ]
    async with running_cluster(executor, max_num_batched_tokens=16) as cluster:
        executor.gate.clear()
        generating = asyncio.create_task(cluster.client.generate_all(requests))
        await cluster.wait_for_states(
            lambda s: s[0].num_running_requests + s[0].num_waiting_requests == 4
        )
        executor.gate.set()
        completions = await generating
        cluster.check_contract()
    good = [c.tokens for c in completions if c.reason == "LENGTH"]
    assert len(good) == 3
    assert all(tokens in map(truth_of, requests) for tokens in good)
