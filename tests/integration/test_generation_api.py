"""Tests several completions of one prompt: scheduler process, real client, fake executor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeAlias

import grpc.aio
import pytest
import pytest_asyncio

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve.scheduler.v1 import scheduler_pb2_grpc
from splitserve_client import (
    BeamSearch,
    EarlyStopping,
    Finish,
    FinishReason,
    SamplingParams,
    Session,
    Tokens,
    Usage,
    collect_generation,
    encode_sampling_params,
)
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [7, 1, 5, 9, 4, 2]
STOPS = (0, 32, 64, 96)
SEVERAL = SamplingParams(seed=2, max_tokens=24, stop_token_ids=STOPS, n=4)
BEST = replace(SEVERAL, n=2, best_of=6)
BEAMS = SamplingParams(seed=0, max_tokens=12, n=3, beam_search=BeamSearch(4))

Ask: TypeAlias = Callable[[list[int], SamplingParams], AsyncIterator[Tokens | Finish]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[FakeService]:
    async with fake_service(FakeExecutor(num_device_blocks=256, fault=StepWatch())) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session(service: FakeService) -> AsyncIterator[Session]:
    async with service.client.session() as opened:
        yield opened


@pytest.fixture(params=["generate", "session"])
def ask(request: pytest.FixtureRequest, service: FakeService, session: Session) -> Ask:
    """Submits a request, in a call of its own or in a session that all of them share."""
    return service.client.generate if request.param == "generate" else session.submit


async def check(
    ask: Ask,
    params: SamplingParams,
    prompt: list[int] | None = None,
    truth: SamplingParams | None = None,
) -> Usage:
    """Asserts that `params` bring what `truth`, or they themselves, must; returns the usage."""
    prompt = prompt or PROMPT
    generation = await collect_generation(ask(prompt, params), params.num_completions)
    assert generation.completions == expected_completions(prompt, truth or params)
    usage = generation.usage
    assert usage.num_prompt_tokens == len(prompt)
    assert usage.num_output_tokens == sum(len(c.token_ids) for c in generation.completions)
    return usage


@pytest.mark.parametrize(
    ("params", "truth"),
    [
        (SEVERAL, SEVERAL),
        (replace(SEVERAL, temperature=0.0), replace(SEVERAL, temperature=0.0)),
        # As many as there are to choose from are not ranked.
        (replace(SEVERAL, best_of=4), SEVERAL),
        (BEST, BEST),
    ],
    ids=["n", "greedy", "best_of n", "best_of"],
)
async def test_generation_brings_the_expected_completions(
    ask: Ask, params: SamplingParams, truth: SamplingParams
) -> None:
    await check(ask, params, truth=truth)


async def test_expected_completions_differ_where_they_should() -> None:
    several, best = (expected_completions(PROMPT, params) for params in (SEVERAL, BEST))
    assert len({c.token_ids for c in several}) == 4
    assert {c.reason for c in several} == {FinishReason.STOP, FinishReason.LENGTH}
    six = expected_completions(PROMPT, replace(SEVERAL, n=6))
    assert {c.token_ids for c in best} < {c.token_ids for c in six}


async def test_first_of_several_sequences_is_that_of_one(ask: Ask) -> None:
    alone = await collect_generation(ask(PROMPT, replace(SEVERAL, n=None)))
    assert alone.token_ids == expected_completions(PROMPT, SEVERAL)[0].token_ids


async def test_generation_streams_all_sequences_and_ends_each(ask: Ask) -> None:
    truth = expected_completions(PROMPT, SEVERAL)
    events = [event async for event in ask(PROMPT, SEVERAL)]
    indexes = [event.index for event in events[:-1] if isinstance(event, Tokens)]
    assert set(indexes[: len(indexes) // 2]) == {0, 1, 2, 3}
    ended: set[int] = set()
    for event in events[:-1]:
        assert isinstance(event, Tokens)
        assert event.index not in ended
        if event.finish is not None:
            assert event.finish.num_output_tokens == len(truth[event.index].token_ids)
            assert event.finish.cumulative_logprob is None
            ended.add(event.index)
    assert ended == {0, 1, 2, 3}
    finish = events[-1]
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.stop_token_id) == (truth[0].reason, truth[0].stop_token_id)


async def test_generation_brings_logprobs_of_each_sequence(ask: Ask) -> None:
    params = replace(SEVERAL, num_logprobs=2, num_prompt_logprobs=1)
    generation = await collect_generation(ask(PROMPT, params), 4)
    truth = expected_completions(PROMPT, SEVERAL)
    for completion, expected in zip(generation.completions, truth, strict=True):
        assert completion.token_ids == expected.token_ids
        assert tuple(score.token_id for score in completion.logprobs) == expected.token_ids
        assert {len(score.top) for score in completion.logprobs} == {2}
    assert [score.token_id for score in generation.prompt_logprobs] == PROMPT[1:]


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 8, 23])
async def test_generation_computes_a_shared_prompt_once(
    ask: Ask, service: FakeService, prompt_len: int
) -> None:
    watch = service.executors[0].fault
    assert isinstance(watch, StepWatch)
    before = len(watch.steps)
    prompt = [(3 * prompt_len + 11 * i) % 128 for i in range(prompt_len)]
    params = SamplingParams(seed=prompt_len, max_tokens=10, n=3)
    usage = await check(ask, params, prompt)
    computed = [
        range(first, first + count)
        for step in watch.steps[before:]
        for first, count in zip(step.num_computed_tokens, step.num_new_tokens, strict=True)
        if first + count <= prompt_len
    ]
    # The last prompt token is computed for each, because each samples after it.
    assert sum(map(len, computed)) + usage.num_cached_tokens <= prompt_len + 2


@pytest.mark.parametrize(
    "params",
    [
        BEAMS,
        replace(BEAMS, n=1),
        replace(BEAMS, n=4, stop_token_ids=STOPS),
        replace(BEAMS, stop_token_ids=STOPS, min_tokens=5),
        replace(BEAMS, beam_search=BeamSearch(16), stop_token_ids=STOPS),
        replace(BEAMS, n=1, beam_search=BeamSearch(1)),
        replace(BEAMS, beam_search=BeamSearch(5, -1.5, EarlyStopping.ALWAYS), stop_token_ids=STOPS),
        replace(BEAMS, beam_search=BeamSearch(3, 2.0, EarlyStopping.NEVER), stop_token_ids=STOPS),
        replace(BEAMS, temperature=0.0, seed=99),
    ],
    ids=lambda params: f"width{params.beam_search.width}-n{params.n}",
)
async def test_beam_search_brings_the_best_hypotheses(ask: Ask, params: SamplingParams) -> None:
    await check(ask, params)
    scores = [c.score for c in expected_completions(PROMPT, params)]
    assert scores == sorted(scores, key=lambda score: -(score or 0.0))


async def test_generations_of_all_kinds_run_together(ask: Ask, service: FakeService) -> None:
    kinds = (SEVERAL, BEST, BEAMS, replace(SEVERAL, n=1))
    requests = [
        ([*PROMPT, number], replace(kinds[number % 4], seed=number)) for number in range(16)
    ]
    generations = await asyncio.gather(
        *(collect_generation(ask(prompt, params), params.n or 1) for prompt, params in requests)
    )
    truth = [expected_completions(prompt, params) for prompt, params in requests]
    assert [generation.completions for generation in generations] == truth
    await service.wait_idle()


@pytest.mark.parametrize("params", [BEST, BEAMS], ids=["best_of", "beam search"])
async def test_stream_waits_for_the_end_when_the_best_are_chosen(
    service: FakeService, params: SamplingParams
) -> None:
    watch = service.executors[0].fault
    assert isinstance(watch, StepWatch)
    longest = max(len(c.token_ids) for c in expected_completions(PROMPT, params))
    before = len(watch.steps)
    request = api.GenerateRequest(
        prompt_token_ids=PROMPT, sampling_params=encode_sampling_params(params)
    )
    kinds = []
    async with grpc.aio.insecure_channel(service.client.address) as channel:
        async for response in scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(request):
            assert len(watch.steps) - before >= longest
            event = response.WhichOneof("event")
            kinds.append((event, getattr(response, event), response.request_id))
    names = [name for name, _, _ in kinds]
    assert names == ["tokens", "sequence_finish"] * (params.n or 1) + ["finish"]
    assert [e.index for _, e, _ in kinds[:-1]] == [i for i in range(params.n or 1) for _ in "ab"]
    assert len({request_id for _, _, request_id in kinds}) == 1


async def test_generation_keeps_its_tokens_when_it_is_aborted(service: FakeService) -> None:
    params = SamplingParams(seed=3, max_tokens=200, n=3)
    truth = expected_completions(PROMPT, params)
    received: list[list[int]] = [[], [], []]
    stream = service.client.generate(PROMPT, params, request_id="to-abort")
    finish: Finish | None = None
    async for event in stream:
        if isinstance(event, Finish):
            finish = event
        else:
            received[event.index] += event.token_ids
            if event.index == 2 and len(received[2]) == 5:
                await service.client.abort("to-abort")
    assert finish is not None
    assert finish.reason is FinishReason.ABORTED
    assert finish.usage.num_output_tokens == sum(map(len, received))
    for tokens, expected in zip(received, truth, strict=True):
        assert tuple(tokens) == expected.token_ids[: len(tokens)]
        assert len(tokens) < 200
    await service.wait_idle()


async def test_generation_waits_for_rows_of_its_sequences() -> None:
    async with fake_service(FakeExecutor(num_device_blocks=128), max_num_seqs=4) as service:
        requests = [replace(SEVERAL, seed=seed, n=1 + seed % 4) for seed in range(8)]
        generations = await asyncio.gather(
            *(service.client.complete(PROMPT, params) for params in requests)
        )
        truth = [expected_completions(PROMPT, params) for params in requests]
        assert [generation.completions for generation in generations] == truth
        await service.wait_idle()
