from __future__ import annotations

import pytest

from splitserve_client import (
    AsyncClient,
    BeamSearch,
    EarlyStopping,
    Generation,
    SamplingParams,
    Tokens,
    collect_generation,
)
from tests.support.fakes.fake_generation import expected_tokens, logprob_of
from tests.support.fakes.fake_scheduler import FakeScheduler
from tests.unit.client.test_client import PROMPT, cut_at

SEED = 11
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


async def test_generate_hands_nothing_out_twice_when_delivery_of_the_best_breaks(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.before_token = cut_at(21)  # type: ignore[assignment]
    events = [event async for event in client.generate(PROMPT, BEST_OF_5)]

    tokens = [event for event in events if isinstance(event, Tokens)]
    assert [(part.index, len(part.token_ids)) for part in tokens if part.token_ids] == [
        (0, 4),
        (1, 4),
    ]


@pytest.mark.parametrize("n", [None, 2])
async def test_complete_returns_scores_when_beams_are_searched(
    client: AsyncClient, fake: FakeScheduler, n: int | None
) -> None:
    beams = BeamSearch(4, length_penalty=0.5, early_stopping=EarlyStopping.NEVER)
    params = SamplingParams(seed=SEED, max_tokens=4, n=n, beam_search=beams)

    generation = await client.complete(PROMPT, params)

    check_best(generation, 4, n or 1)
    best = generation.completions[0]
    assert best.score == pytest.approx(sum(map(logprob_of, best.token_ids)) / 2)
    sent = fake.requests[0].sampling_params
    assert (sent.beam_search.width, sent.beam_search.length_penalty) == (4, 0.5)
    assert sent.beam_search.early_stopping == 3  # BEAM_EARLY_STOPPING_NEVER
    assert sent.HasField("n") == (n is not None)


async def test_complete_leaves_defaults_to_the_server_when_only_the_width_is_given(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    await client.complete(PROMPT, SamplingParams(max_tokens=1, beam_search=BeamSearch(2)))

    beams = fake.requests[0].sampling_params.beam_search
    assert [field.name for field, _ in beams.ListFields()] == ["width"]


async def test_session_returns_the_best_when_its_stream_breaks(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.before_token = cut_at(5, 27)  # type: ignore[assignment]

    async with client.session() as session:
        generation = await collect_generation(session.submit(PROMPT, BEST_OF_5), 2)

    check_best(generation, 5, 2)
    assert len(fake.requests) == 3
