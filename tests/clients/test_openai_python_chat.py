"""The official Python package: chats, before a real model."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI, OpenAI

from tests.clients.stack import ServedModel
from tests.clients.stories import (
    GREETING,
    HELLO,
    STORY,
    USER,
)


def test_chat_answer_is_whole(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=[USER], temperature=0, max_completion_tokens=6
    )

    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", STORY)
    assert (choice.finish_reason, choice.index) == ("length", 0)
    assert answer.object == "chat.completion"
    assert answer.model == model
    assert answer.usage is not None
    assert answer.usage.model_dump(
        include={"prompt_tokens", "completion_tokens", "total_tokens"}
    ) == {"prompt_tokens": 12, "completion_tokens": 6, "total_tokens": 18}


def test_chat_stream_has_role_texts_reason_and_usage(client: OpenAI, model: str) -> None:
    *chunks, last = client.chat.completions.create(
        model=model,
        messages=[USER],
        temperature=0,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    )

    choices = [chunk.choices[0] for chunk in chunks]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == STORY
    assert [c.finish_reason for c in choices if c.finish_reason] == ["length"]
    assert choices[-1].finish_reason == "length"
    assert (last.choices, last.usage and last.usage.total_tokens) == ([], 18)
    assert {chunk.id for chunk in [*chunks, last]} == {last.id}


def test_chat_stream_helper_gathers_the_answer(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=[HELLO], temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()

    assert "".join(deltas) == final.choices[0].message.content == GREETING


def test_chat_several_choices_are_as_many_and_differ(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=[USER], temperature=1.5, seed=3, n=3, max_tokens=30
    )

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_chat_answer_is_the_same_when_the_seed_is(client: OpenAI, model: str) -> None:
    texts = {
        client.chat.completions.create(
            model=model, messages=[USER], temperature=1, seed=seed, max_tokens=30
        )
        .choices[0]
        .message.content
        for seed in (5, 5, 6)
    }

    assert len(texts) == 2


def test_chat_logprobs_spell_the_text(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[USER],
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=2,
    )

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    spelled = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert spelled.decode() == "".join(token.token for token in logprobs.content) == STORY
    for token in logprobs.content:
        first, second = token.top_logprobs
        assert (first.token, first.logprob) == (token.token, token.logprob)
        assert 0 >= first.logprob >= second.logprob


def test_chat_text_ends_before_the_stop_string(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=[USER], temperature=0, max_tokens=20, stop=["me, th"]
    )

    assert answer.choices[0].message.content == "Once upon a ti"
    assert answer.choices[0].finish_reason == "stop"


def test_chat_conversation_goes_on_with_an_answer_as_it_came(client: OpenAI, model: str) -> None:
    first = client.chat.completions.create(
        model=model, messages=[USER], temperature=0, max_tokens=6
    )
    more: Any = [USER, first.choices[0].message, {"role": "user", "content": "Go on."}]

    second = client.chat.completions.create(model=model, messages=more, max_tokens=3)

    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_chat_extra_fields_are_understood(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[USER],
        temperature=0,
        max_tokens=6,
        extra_body={"top_k": 5, "min_p": 0.1, "return_token_ids": True, "priority": 1},
    )

    assert answer.choices[0].message.content == STORY
    extra: Any = answer.choices[0].model_extra
    assert len(extra["token_ids"]) == 6


def test_chat_server_is_free_when_a_stream_is_left(client: OpenAI, model: str) -> None:
    with client.chat.completions.create(
        model=model,
        messages=[USER],
        max_tokens=1900,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        assert next(iter(stream)).choices[0].delta.role == "assistant"

    answer = client.chat.completions.create(
        model=model, messages=[USER], temperature=0, max_tokens=6
    )
    assert answer.choices[0].message.content == STORY


async def test_async_answers_are_not_mixed_up_when_many_are_asked_for(served: ServedModel) -> None:
    animals = ["fox", "owl", "cat", "dog", "bear", "frog", "mouse", "duck"]

    async with AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="none") as client:

        async def tell(animal: str) -> str:
            message: Any = {"role": "user", "content": f"Tell me a story about a {animal}."}
            stream = await client.chat.completions.create(
                model=served.model, messages=[message], temperature=0, max_tokens=16, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        together = await asyncio.gather(*map(tell, animals))
        alone = [await tell(animal) for animal in animals]

    assert together == alone
    assert len(set(alone)) > 1


async def test_async_stream_helper_gathers_the_answer(served: ServedModel) -> None:
    async with (
        AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="none") as client,
        client.chat.completions.stream(
            model=served.model, messages=[HELLO], temperature=0
        ) as stream,
    ):
        final = await stream.get_final_completion()

    assert final.choices[0].message.content == GREETING
