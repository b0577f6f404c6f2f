"""The official Python package drives the whole surface, before a real model.

Texts are those that vLLM's server gives, which serves the same model: `vllm_recording`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.clients.stack import ServedModel

USER: Any = {"role": "user", "content": "Tell me a story about a fox."}
STORY = "Once upon a time, there"
HELLO: Any = {"role": "user", "content": "Hello!"}
# All of the answer to that, 23 tokens.
GREETING = "Hello! I am a tiny story model. Ask me for a story about an animal."
PROMPT = "Once upon a time"
CONTINUATION = ", a funny lamb named Ravi"
# Against white space without end, which JSON allows and the model likes.
TERSE: Any = {"temperature": 0, "frequency_penalty": 2}


class Place(BaseModel):
    """Where it is."""

    city: Literal["Oslo"]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo"]


TOOL = openai.pydantic_function_tool(GetWeather)
CALL: Any = {"type": "function", "function": {"name": "GetWeather"}}
RESPONSES_TOOL: Any = {"type": "function", **TOOL["function"]}


@pytest.fixture
def client(served: ServedModel) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(served: ServedModel) -> str:
    return served.model


def test_models_are_listed(client: OpenAI, model: str) -> None:
    assert [item.id for item in client.models.list()] == [model]


class TestChat:
    def test_answer_is_whole(self, client: OpenAI, model: str) -> None:
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

    def test_stream_has_role_texts_reason_and_usage(self, client: OpenAI, model: str) -> None:
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

    def test_stream_helper_gathers_the_answer(self, client: OpenAI, model: str) -> None:
        with client.chat.completions.stream(model=model, messages=[HELLO], temperature=0) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()

        assert "".join(deltas) == final.choices[0].message.content == GREETING

    def test_several_choices_are_as_many_and_differ(self, client: OpenAI, model: str) -> None:
        answer = client.chat.completions.create(
            model=model, messages=[USER], temperature=1.5, seed=3, n=3, max_tokens=30
        )

        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in answer.choices}) == 3

    def test_answer_is_the_same_when_the_seed_is(self, client: OpenAI, model: str) -> None:
        texts = {
            client.chat.completions.create(
                model=model, messages=[USER], temperature=1, seed=seed, max_tokens=30
            )
            .choices[0]
            .message.content
            for seed in (5, 5, 6)
        }

        assert len(texts) == 2

    def test_logprobs_spell_the_text(self, client: OpenAI, model: str) -> None:
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

    def test_text_ends_before_the_stop_string(self, client: OpenAI, model: str) -> None:
        answer = client.chat.completions.create(
            model=model, messages=[USER], temperature=0, max_tokens=20, stop=["me, th"]
        )

        assert answer.choices[0].message.content == "Once upon a ti"
        assert answer.choices[0].finish_reason == "stop"

    def test_conversation_goes_on_with_an_answer_as_it_came(
        self, client: OpenAI, model: str
    ) -> None:
        first = client.chat.completions.create(
            model=model, messages=[USER], temperature=0, max_tokens=6
        )
        more: Any = [USER, first.choices[0].message, {"role": "user", "content": "Go on."}]

        second = client.chat.completions.create(model=model, messages=more, max_tokens=3)

        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.prompt_tokens > first.usage.total_tokens

    def test_extra_fields_are_understood(self, client: OpenAI, model: str) -> None:
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

    def test_server_is_free_when_a_stream_is_left(self, client: OpenAI, model: str) -> None:
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


class TestTools:
    @pytest.mark.parametrize("tool_choice", ["required", CALL], ids=["required", "named"])
    def test_call_has_arguments_of_the_schema(
        self,
        client: OpenAI,
        model: str,
        tool_choice: Any,  # noqa: ANN401
    ) -> None:
        answer = client.chat.completions.parse(
            model=model,
            messages=[USER],
            tools=[TOOL],
            tool_choice=tool_choice,
            max_tokens=150,
            **TERSE,
        )

        (call,) = answer.choices[0].message.tool_calls or []
        assert (call.type, call.function.name) == ("function", "GetWeather")
        assert call.function.parsed_arguments == GetWeather(city="Oslo")

    def test_streamed_call_is_the_whole_one(self, client: OpenAI, model: str) -> None:
        with client.chat.completions.stream(
            model=model,
            messages=[USER],
            tools=[TOOL],
            tool_choice="required",
            max_tokens=150,
            **TERSE,
        ) as stream:
            events = list(stream)
            final = stream.get_final_completion()

        (done,) = [e for e in events if e.type == "tool_calls.function.arguments.done"]
        deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
        assert "".join(event.arguments_delta for event in deltas) == done.arguments
        assert json.loads(done.arguments) == {"city": "Oslo"}
        (call,) = final.choices[0].message.tool_calls or []
        assert call.id
        assert call.function.parsed_arguments == GetWeather(city="Oslo")
        assert final.choices[0].finish_reason == "tool_calls"

    def test_result_of_a_call_goes_back(self, client: OpenAI, model: str) -> None:
        asked = client.chat.completions.create(
            model=model,
            messages=[USER],
            tools=[TOOL],
            tool_choice="required",
            max_tokens=150,
            **TERSE,
        )
        (call,) = asked.choices[0].message.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        more: Any = [USER, asked.choices[0].message, result]

        answer = client.chat.completions.create(
            model=model, messages=more, tools=[TOOL], temperature=0, max_tokens=6
        )

        assert answer.choices[0].message.content
        assert not answer.choices[0].message.tool_calls

    def test_text_is_no_call(self, client: OpenAI, model: str) -> None:
        answer = client.chat.completions.create(
            model=model, messages=[USER], tools=[TOOL], temperature=0, max_tokens=6
        )

        assert answer.choices[0].message.content == STORY
        assert answer.choices[0].message.tool_calls is None


class TestStructuredOutput:
    def test_answer_is_parsed(self, client: OpenAI, model: str) -> None:
        answer = client.chat.completions.parse(
            model=model, messages=[USER], response_format=Place, max_tokens=80, **TERSE
        )

        assert answer.choices[0].message.parsed == Place(city="Oslo")
        assert answer.choices[0].finish_reason == "stop"

    def test_streamed_answer_is_parsed(self, client: OpenAI, model: str) -> None:
        with client.chat.completions.stream(
            model=model, messages=[USER], response_format=Place, max_tokens=80, **TERSE
        ) as stream:
            final = stream.get_final_completion()

        assert final.choices[0].message.parsed == Place(city="Oslo")

    def test_json_object_is_one(self, client: OpenAI, model: str) -> None:
        answer = client.chat.completions.create(
            model=model,
            messages=[USER],
            response_format={"type": "json_object"},
            max_tokens=200,
            logit_bias={"2": 1},
            **TERSE,
        )

        assert (answer.choices[0].message.content or "").lstrip().startswith("{")

    def test_answer_that_is_cut_off_says_so(self, client: OpenAI, model: str) -> None:
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(
                model=model, messages=[USER], response_format=Place, max_tokens=2
            )


class TestCompletions:
    def test_answer_is_whole(self, client: OpenAI, model: str) -> None:
        answer = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=6)

        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (CONTINUATION, "length")
        assert answer.usage is not None
        assert answer.usage.total_tokens == 10

    def test_stream_is_the_same_text(self, client: OpenAI, model: str) -> None:
        chunks = client.completions.create(
            model=model, prompt=PROMPT, temperature=0, max_tokens=6, stream=True
        )

        assert "".join(chunk.choices[0].text for chunk in chunks) == CONTINUATION

    def test_batch_answers_each_prompt(self, client: OpenAI, model: str) -> None:
        answer = client.completions.create(
            model=model, prompt=[PROMPT, "The fox", PROMPT], temperature=0, max_tokens=6
        )

        texts = [choice.text for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert texts == [CONTINUATION, " was a grumpy robot who lived", CONTINUATION]

    def test_echo_repeats_the_prompt_with_its_logprobs(self, client: OpenAI, model: str) -> None:
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


class TestResponses:
    def test_answer_is_whole(self, client: OpenAI, model: str) -> None:
        answer = client.responses.create(model=model, input="Hello!", temperature=0)

        assert (answer.output_text, answer.status) == (GREETING, "completed")
        assert answer.usage is not None
        assert answer.usage.output_tokens == 23
        assert answer.usage.input_tokens + 23 == answer.usage.total_tokens

    def test_answer_that_is_cut_off_is_incomplete(self, client: OpenAI, model: str) -> None:
        answer = client.responses.create(
            model=model, input="Hello!", temperature=0, max_output_tokens=2
        )

        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"

    def test_stream_helper_gathers_the_answer(self, client: OpenAI, model: str) -> None:
        with client.responses.stream(model=model, input="Hello!", temperature=0) as stream:
            events = list(stream)
            final = stream.get_final_response()

        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == final.output_text == GREETING
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        numbers = [event.sequence_number for event in events]
        assert numbers == list(range(len(events)))

    def test_answer_is_parsed(self, client: OpenAI, model: str) -> None:
        answer = client.responses.parse(
            model=model,
            input="Where?",
            text_format=Place,
            temperature=0,
            max_output_tokens=80,
            extra_body={"frequency_penalty": 2},
        )

        assert answer.output_parsed == Place(city="Oslo")

    def test_tool_is_called_and_its_result_goes_back(self, client: OpenAI, model: str) -> None:
        asked = client.responses.create(
            model=model,
            input="The weather?",
            tools=[RESPONSES_TOOL],
            tool_choice="required",
            temperature=0,
            max_output_tokens=150,
            extra_body={"frequency_penalty": 2},
        )
        (call,) = asked.output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("GetWeather", {"city": "Oslo"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        more: Any = [{"role": "user", "content": "The weather?"}, call, result]

        answer = client.responses.create(
            model=model, input=more, tools=[RESPONSES_TOOL], temperature=0, max_output_tokens=6
        )

        assert answer.output_text

    def test_conversation_is_a_list(self, client: OpenAI, model: str) -> None:
        first = client.responses.create(
            model=model, input="Hello!", instructions="You tell stories.", temperature=0
        )
        more: Any = [HELLO, *first.output, USER]

        second = client.responses.create(
            model=model, input=more, temperature=0, max_output_tokens=6
        )

        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens
        assert second.output_text


class TestErrors:
    def test_unknown_model_is_not_found(self, client: OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as raised:
            client.chat.completions.create(model="nobody", messages=[USER])

        assert raised.value.param == "model"
        assert "nobody" in raised.value.message

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"temperature": -1}, "temperature"),
            ({"top_p": 1.5}, "top_p"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": "many"}, "max_tokens"),
            ({"n": 0}, "n"),
            ({"logit_bias": {"1000000": 1}}, "logit_bias"),
            ({"messages": []}, "messages"),
            ({"messages": "hello"}, "messages"),
            ({"no_such_field": 1}, "no_such_field"),
            ({"response_format": {"type": "json_schema"}}, "response_format"),
            ({"tool_choice": "required"}, "tool_choice"),
        ],
    )
    def test_bad_request_names_the_field(
        self, client: OpenAI, model: str, fields: dict[str, Any], param: str
    ) -> None:
        body = {"model": model, "messages": [USER], **fields}

        with pytest.raises(openai.BadRequestError) as raised:
            client.post("/chat/completions", body=body, cast_to=object)

        assert (raised.value.param or "").startswith(param)
        assert raised.value.type == "invalid_request_error"

    @pytest.mark.parametrize("is_stream", [False, True])
    def test_prompt_beyond_the_model_is_a_bad_request(
        self, client: OpenAI, model: str, is_stream: bool
    ) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(model=model, prompt=[5] * 2100, stream=is_stream)

        assert raised.value.code == "context_length_exceeded"

    def test_server_that_is_not_there_is_a_connection_error(self) -> None:
        with (
            OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.APIConnectionError),
        ):
            client.models.list()


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
