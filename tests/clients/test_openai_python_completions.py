"""The official Python package: completions and models, before a real model."""

from __future__ import annotations

from openai import OpenAI

from tests.clients.stories import (
    CONTINUATION,
    PROMPT,
)


def test_models_are_listed(client: OpenAI, model: str) -> None:
    assert [item.id for item in client.models.list()] == [model]


def test_completion_answer_is_whole(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=6)

    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (CONTINUATION, "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 10


def test_completion_stream_is_the_same_text(client: OpenAI, model: str) -> None:
    chunks = client.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=6, stream=True
    )

    assert "".join(chunk.choices[0].text for chunk in chunks) == CONTINUATION


def test_completion_batch_answers_each_prompt(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=[PROMPT, "The fox", PROMPT], temperature=0, max_tokens=6
    )

    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts == [CONTINUATION, " was a grumpy robot who lived", CONTINUATION]


def test_completion_echo_repeats_the_prompt_with_its_logprobs(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=2, echo=True, logprobs=1
    )

    (choice,) = answer.choices
    assert choice.text == PROMPT + ", a"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["Once", " upon", " a", " time", ",", " a"]
    assert choice.logprobs.text_offset == [0, 4, 9, 11, 16, 17]
    assert choice.logprobs.token_logprobs is not None
    first, *others = choice.logprobs.token_logprobs
    assert first is None
    assert all(logprob is not None and logprob <= 0 for logprob in others)
