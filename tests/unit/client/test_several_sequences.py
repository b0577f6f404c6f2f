"""Requests of several sequences, and of the best of several, when streams break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from splitserve_client import (
    AsyncClient,
    BeamSearch,
    Finish,
    FinishReason,
    Generation,
    SamplingParams,
    SequenceFinish,
    Tokens,
    collect_generation,
)
from tests.support.fakes.fake_scheduler import FakeScheduler, expected_tokens, logprob_of
from tests.support.processes.patience import PATIENCE_S
from tests.unit.client.test_client import PROMPT, cut_at

SEED = 11
# Sequence 1 ends with its second token, and no other contains it.
STOP = expected_tokens(PROMPT, SEED, 2, index=1)[1]
THREE = SamplingParams(seed=SEED, max_tokens=5, n=3, stop_token_ids=(STOP,))
EXPECTED = [
    expected_tokens(PROMPT, SEED, 5, 0),
    expected_tokens(PROMPT, SEED, 2, 1),
    expected_tokens(PROMPT, SEED, 5, 2),
]


async def collect_parts(
    events: AsyncIterator[Tokens | Finish],
) -> tuple[list[list[int]], list[SequenceFinish], Finish]:
    token_ids: list[list[int]] = [[], [], []]
    finishes: list[SequenceFinish] = []
    async for event in events:
        if isinstance(event, Finish):
            return token_ids, finishes, event
        token_ids[event.index].extend(event.token_ids)
        if event.finish is not None:
            assert event.finish.index == event.index
            finishes.append(event.finish)
    raise AssertionError("no finish")


def check_three(result: tuple[list[list[int]], list[SequenceFinish], Finish]) -> None:
    token_ids, finishes, finish = result
    assert token_ids == EXPECTED
    assert sorted(finishes, key=lambda end: end.index) == [
        SequenceFinish(0, FinishReason.LENGTH, None, 5),
        SequenceFinish(1, FinishReason.STOP, STOP, 2),
        SequenceFinish(2, FinishReason.LENGTH, None, 5),
    ]
    assert finish.reason is FinishReason.LENGTH
    assert finish.usage.num_output_tokens == 12


# Tokens in order: sequences 0 1 2, 0 1 2 (1 ends), 0 2, 0 2, 0 2.
@pytest.mark.parametrize(
    "cuts", [(), (0,), (1,), (4,), (5,), (7, 8), (11,), tuple(range(0, 23, 2))]
)
async def test_generate_loses_no_sequence_when_the_stream_breaks(
    client: AsyncClient, fake: FakeScheduler, cuts: tuple[int, ...]
) -> None:
    fake.before_token = cut_at(*cuts)  # type: ignore[assignment]

    check_three(await collect_parts(client.generate(PROMPT, THREE)))

    assert len(fake.requests) == 1 + len(cuts)


async def test_generate_resumes_a_finished_sequence_with_all_its_tokens(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.before_token = cut_at(7)  # type: ignore[assignment]

    await collect_parts(client.generate(PROMPT, THREE))

    resumed = fake.requests[1]
    assert [(entry.index, list(entry.token_ids)) for entry in resumed.resume_sequences] == [
        (0, EXPECTED[0][:3]),
        (1, EXPECTED[1]),
        (2, EXPECTED[2][:2]),
    ]
    assert not resumed.resume_token_ids
    assert resumed.sampling_params == fake.requests[0].sampling_params


async def test_session_loses_no_sequence_when_its_stream_breaks(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.before_token = cut_at(9, 17, 30)  # type: ignore[assignment]

    async with client.session() as session:
        streams = [session.submit(PROMPT, THREE) for _ in range(3)]
        plain = session.submit(PROMPT, SamplingParams(seed=SEED, max_tokens=7))
        for stream in streams:
            check_three(await collect_parts(stream))
        generation = await collect_generation(plain)

    assert list(generation.token_ids) == expected_tokens(PROMPT, SEED, 7)


async def test_session_request_keeps_what_came_when_it_is_aborted(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    def before_token(number: int) -> None:
        if number == 6:
            fake.hold = asyncio.Event()

    fake.before_token = before_token

    async with client.session() as session:
        stream = session.submit(PROMPT, THREE)
        events: list[Tokens | Finish] = []
        async for event in stream:
            events.append(event)
            if isinstance(event, Tokens) and event.index == 2 and len(events) >= 7:
                stream.abort()

    async def again() -> AsyncIterator[Tokens | Finish]:
        for event in events:
            yield event

    generation = await collect_generation(again(), 3)
    reasons = [completion.reason for completion in generation.completions]
    assert reasons == [FinishReason.ABORTED, FinishReason.STOP, FinishReason.ABORTED]
    assert list(generation.completions[2].token_ids) == EXPECTED[2][:2]


async def test_complete_ends_the_call_when_its_task_is_cancelled(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.hold = asyncio.Event()
    has_arrived = asyncio.Event()
    fake.before_request = lambda request: has_arrived.set()

    task = asyncio.create_task(client.complete(PROMPT, THREE))
    await asyncio.wait_for(has_arrived.wait(), PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await asyncio.wait_for(fake.ended.wait(), PATIENCE_S)


BEST_OF_5 = SamplingParams(seed=SEED, max_tokens=4, n=2, best_of=5)


def check_best(generation: Generation, num_computed: int, n: int) -> None:
    all_tokens = [expected_tokens(PROMPT, SEED, 4, index) for index in range(num_computed)]
    all_tokens.sort(key=lambda tokens: -sum(map(logprob_of, tokens)))
    assert [list(best.token_ids) for best in generation.completions] == all_tokens[:n]
    for best in generation.completions:
        assert best.cumulative_logprob == pytest.approx(sum(map(logprob_of, best.token_ids)))


# 20 tokens are computed, then 2 completions delivered.
@pytest.mark.parametrize("cuts", [(), (0,), (9,), (20,), (21,), (21, 43)])
async def test_complete_returns_the_best_when_the_stream_breaks(
    client: AsyncClient, fake: FakeScheduler, cuts: tuple[int, ...]
) -> None:
    fake.before_token = cut_at(*cuts)  # type: ignore[assignment]

    generation = await client.complete(PROMPT, BEST_OF_5)

    check_best(generation, 5, 2)
    assert generation.usage.num_output_tokens == 8
    assert len(fake.requests) == 1 + len(cuts)
    assert not any(request.resume_sequences for request in fake.requests)


async def test_complete_sends_only_the_beam_width_when_given_alone(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    await client.complete(PROMPT, SamplingParams(max_tokens=1, beam_search=BeamSearch(2)))

    beams = fake.requests[0].sampling_params.beam_search
    assert [field.name for field, _ in beams.ListFields()] == ["width"]
