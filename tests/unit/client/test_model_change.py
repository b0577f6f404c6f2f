"""Texts when the scheduler comes to serve another model with another vocabulary."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from splitserve_client import (
    AsyncClient,
    DeadlineExceeded,
    ModelChanged,
    Piece,
    Prompt,
    SamplingParams,
)
from tests.support.fakes.fake_scheduler import VOCAB_SIZE, Cut, FakeScheduler, expected_tokens
from tests.support.fakes.running_schedulers import TEMPLATE
from tests.support.models import tiny_tokenizers
from tests.unit.client.conftest import VirtualTime

PARAMS = SamplingParams(seed=5, max_tokens=4)
OTHER_DIGEST = "0100"


def tokenizer_files(*, is_reversed: bool) -> dict[str, bytes]:
    tokenizer = tiny_tokenizers.words(VOCAB_SIZE, is_reversed=is_reversed)
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }


@pytest.fixture
def fake() -> FakeScheduler:
    return FakeScheduler(tokenizer_files=tokenizer_files(is_reversed=False))


def serve_other(fake: FakeScheduler) -> None:
    fake.model_digest = OTHER_DIGEST
    fake.tokenizer_files = tokenizer_files(is_reversed=True)


def word_in_other(number: int) -> int:
    """The token of a word in the vocabulary of the other model; and the word of a token."""
    return VOCAB_SIZE - 1 - number


def answer(number: int) -> str:
    token_ids = expected_tokens([number], 5, 4)
    return "".join(f" t{token_id}" for token_id in token_ids)


def answer_of_other(number: int) -> str:
    token_ids = expected_tokens([word_in_other(number)], 5, 4)
    return "".join(f" t{word_in_other(token_id)}" for token_id in token_ids)


async def test_text_is_encoded_anew_when_another_model_is_served(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    before = await client.complete_text("t3", PARAMS)
    serve_other(fake)
    after = await asyncio.gather(*(client.complete_text("t3", PARAMS) for _ in range(5)))

    assert before.text == answer(3)
    assert {generation.text for generation in after} == {answer_of_other(3)}
    taken = [request for request in fake.requests if request.model_digest == OTHER_DIGEST]
    assert [list(request.prompt_token_ids) for request in taken] == [[word_in_other(3)]] * 5


async def test_chat_and_bad_words_are_reencoded_when_model_changes(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    await client.complete_text("t3", PARAMS)
    serve_other(fake)
    await client.chat([{"role": "user", "content": "t3"}], PARAMS, bad_words=["t4"])

    request = fake.requests[-1]
    assert list(request.prompt_token_ids) == [word_in_other(3), word_in_other(9)]
    (bad_word,) = request.sampling_params.bad_words_token_ids
    assert list(bad_word.token_ids) == [word_in_other(4)]


async def test_text_fails_when_the_model_changes_again_and_again(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    def before_request(request: object) -> None:
        fake.model_digest += "x"

    await client.complete_text("t3", PARAMS)
    fake.before_request = before_request

    with pytest.raises(ModelChanged):
        await client.complete_text("t3", PARAMS)

    assert len(fake.requests) == 1 + 2


@pytest.mark.parametrize("number", [1, 3])
async def test_text_fails_when_the_model_changes_in_its_midst(
    client: AsyncClient, fake: FakeScheduler, number: int
) -> None:
    def before_token(count: int) -> None:
        if count == number:
            serve_other(fake)
            raise Cut

    fake.before_token = before_token
    texts = []

    async def read() -> None:
        async for part in client.stream_text("t3", PARAMS):
            assert isinstance(part, Piece)
            texts.append(part.text)

    with pytest.raises(ModelChanged):
        await read()

    assert answer(3).startswith("".join(texts))
    assert len(texts) == number
    # Whoever asks again is answered by the other.
    assert (await client.complete_text("t3", PARAMS)).text == answer_of_other(3)


async def test_text_is_reencoded_when_model_changes_before_first_token(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    def before_token(count: int) -> None:
        if count == 0:
            serve_other(fake)
            raise Cut

    fake.before_token = before_token

    assert (await client.complete_text("t3", PARAMS)).text == answer_of_other(3)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        (Prompt(token_ids=(3,)), PARAMS),
        (Prompt("t3"), SamplingParams(stop_token_ids=(7,))),
        (Prompt("t3"), SamplingParams(logit_bias={7: 1.0})),
        (Prompt("t3"), SamplingParams(allowed_token_ids=(7,))),
        (Prompt("t3"), SamplingParams(bad_words_token_ids=((7,),))),
    ],
)
async def test_text_fails_when_it_has_token_ids_of_another_model(
    client: AsyncClient, fake: FakeScheduler, prompt: Prompt, params: SamplingParams
) -> None:
    await client.complete_text("t3", PARAMS)
    serve_other(fake)

    with pytest.raises(ModelChanged):
        await client.complete_text(prompt, params)

    assert len(fake.requests) == 2


async def test_timeout_holds_over_both_when_a_text_is_encoded_anew(
    client: AsyncClient, fake: FakeScheduler, virtual_time: VirtualTime
) -> None:
    def before_request(request: object) -> None:
        virtual_time.now_s += 6

    await client.complete_text("t3", PARAMS)
    serve_other(fake)
    fake.before_request = before_request

    with pytest.raises(DeadlineExceeded):
        await client.complete_text("t3", PARAMS, timeout_s=5)

    assert len(fake.requests) == 2


async def test_map_reencodes_the_rest_when_model_changes(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    def before_request(request: object) -> None:
        if len(fake.requests) == 6:
            serve_other(fake)

    fake.before_request = before_request
    mapped = client.map(
        [f"t{number}" for number in range(2, 14)], PARAMS, max_running=1, show_progress=False
    )
    async with aclosing(mapped):
        texts = [result.text async for result in mapped]

    expected = [answer(number) for number in range(2, 7)]
    expected += [answer_of_other(number) for number in range(7, 14)]
    assert texts == expected


async def test_map_fails_one_item_when_model_changes_midway(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    def before_token(count: int) -> None:
        if count == 6:
            serve_other(fake)
            raise Cut

    fake.before_token = before_token
    mapped = client.map(["t2", "t3", "t4"], PARAMS, max_running=1, show_progress=False)
    async with aclosing(mapped):
        first, second, third = [result async for result in mapped]

    assert (first.text, third.text) == (answer(2), answer_of_other(4))
    assert isinstance(second.error, ModelChanged)


async def test_generate_fails_when_another_model_is_served_than_it_names(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    await client.complete([3], PARAMS, model_digest=fake.model_digest)

    with pytest.raises(ModelChanged):
        await client.complete([3], PARAMS, model_digest=OTHER_DIGEST)


async def test_tokenizer_is_read_again_when_it_could_not_be(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    files, fake.tokenizer_files = fake.tokenizer_files, {}
    with pytest.raises(Exception, match="no tokenizer"):
        await client.complete_text("t3", PARAMS)
    fake.tokenizer_files = files

    assert (await client.complete_text("t3", PARAMS)).text == answer(3)
