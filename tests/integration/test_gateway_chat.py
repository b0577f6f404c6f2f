"""`/v1/chat/completions` through a gateway, a scheduler process and a fake executor."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from executor_service.steps import SAMPLING_FEATURES, Feature
from splitserve_client import SamplingParams
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/chat/completions"
Json = dict[str, Any]
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox?"}]
RENDERED = "<s>[system]be brief\n[user]the fox?\n[assistant]"
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
# What it has says how a model of the Hermes kind calls and reasons.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }} in <tool_call> {% endif %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}({{ call['function']['name'] }}"
    " {{ call['function']['arguments'] | tojson }}){% endfor %}"
    "{% if message['tool_call_id'] %}={{ message['tool_call_id'] }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if thinks %}<think>{% endif %}{% endif %}"
    "{# <think> #}"
)
ADDED = (CALL, "<think>", "hm", "</think>", "Yes.")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    executor = text_executor(
        tmp_path_factory.mktemp("files"),
        features=SAMPLING_FEATURES | {Feature.GRAMMAR},
        eos_token_ids=(1,),
    )
    async with running_gateway(executor) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hermes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("hermes")
    async with running_gateway(text_executor(folder, TEMPLATE, ADDED)) as running:
        yield running


def tokens_of(gateway: RunningGateway, params: SamplingParams) -> list[tuple[int, ...]]:
    prompt = gateway.tokenizer.encode(RENDERED, add_special_tokens=False)
    completions = expected_completions(prompt, params, vocab_size=406)
    return [completion.token_ids for completion in completions]


def text_of(gateway: RunningGateway, token_ids: Sequence[int]) -> str:
    return gateway.tokenizer.decode(token_ids)


def joined(events: Sequence[Json], num_choices: int = 1) -> list[Json]:
    """The messages and ends that the events of a stream add up to."""
    choices: list[Json] = [{"message": {}} for _ in range(num_choices)]
    for event in events:
        for choice in event["choices"]:
            whole = choices[choice["index"]]
            message = whole["message"]
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    join_calls(message.setdefault(name, []), value)
                elif name == "role":
                    message[name] = value
                else:
                    message[name] = message.get(name, "") + value
            for name in ("finish_reason", "stop_reason"):
                if choice.get(name) is not None:
                    whole[name] = choice[name]
    return choices


def join_calls(calls: list[Json], pieces: Sequence[Json]) -> None:
    for piece in pieces:
        if piece["index"] == len(calls):
            call = {name: value for name, value in piece.items() if name != "index"}
            calls.append({**call, "function": dict(piece["function"])})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


async def both(gateway: RunningGateway, **body: object) -> tuple[Json, list[Json]]:
    """The answer at once, and streamed; asserts that both say the same."""
    whole = await gateway.post(PATH, **body)
    events = await gateway.stream(PATH, **body)
    for choice, streamed in zip(
        whole["choices"], joined(events, len(whole["choices"])), strict=True
    ):
        message = {**choice["message"], "content": choice["message"]["content"] or ""}
        assert message.pop("refusal") is None
        for call in [*message.get("tool_calls", ()), *streamed["message"].get("tool_calls", ())]:
            assert len(call.pop("id")) > 8
        assert streamed["message"] == message
        assert streamed["finish_reason"] == choice["finish_reason"]
    return whole, events


async def test_chat_brings_the_expected_tokens_when_n_is_2(
    gateway: RunningGateway,
) -> None:
    params = SamplingParams(seed=5, max_tokens=40, n=2)
    body = {"messages": MESSAGES, "seed": 5, "max_tokens": 40, "n": 2, "ignore_eos": True}
    whole, events = await both(gateway, **body)
    texts = [text_of(gateway, token_ids) for token_ids in tokens_of(gateway, params)]
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts
    for event in events[:2]:
        assert event["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert whole["object"] == "chat.completion"
    assert whole["usage"]["completion_tokens"] == 80


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "the fox?"}],
        [
            {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "user", "content": [{"type": "text", "text": "the fox?"}], "name": None},
        ],
    ],
)
async def test_messages_are_rendered_alike_when_they_say_the_same(
    gateway: RunningGateway, messages: list[Json]
) -> None:
    expected = gateway.tokenizer.encode(RENDERED, add_special_tokens=False)
    answer = await gateway.post("/tokenize", messages=messages)
    assert answer["tokens"] == expected
    assert answer["count"] == len(expected)
    chat = await gateway.post(PATH, messages=messages, max_tokens=1, return_token_ids=True)
    assert chat["prompt_token_ids"] == expected


async def test_answer_has_the_model_length_when_no_limit_is_given(
    gateway: RunningGateway,
) -> None:
    answer = await gateway.post(PATH, messages=MESSAGES, ignore_eos=True, seed=1)
    assert answer["usage"]["total_tokens"] == 1024
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_max_completion_tokens_goes_before_max_tokens(gateway: RunningGateway) -> None:
    body = {"messages": MESSAGES, "ignore_eos": True}
    answer = await gateway.post(PATH, **body, max_tokens=9, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


async def test_chat_of_token_ids_is_that_of_its_messages(gateway: RunningGateway) -> None:
    token_ids = gateway.tokenizer.encode(RENDERED, add_special_tokens=False)
    body = {"seed": 3, "max_tokens": 9}
    by_ids = await gateway.post(PATH, **body, prompt_token_ids=token_ids)
    by_messages = await gateway.post(PATH, **body, messages=MESSAGES)
    assert by_ids["choices"] == by_messages["choices"]


# -- tools and reasoning ---------------------------------------------------------------------------


def only(gateway: RunningGateway, *texts: str) -> list[int]:
    ids = [gateway.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert all(len(token_ids) == 1 for token_ids in ids)
    return [token_ids[0] for token_ids in ids]


@pytest.mark.parametrize("is_parallel", [True, False])
async def test_calls_are_told_apart_when_there_are_tools(
    hermes: RunningGateway, is_parallel: bool
) -> None:
    whole, _ = await both(
        hermes,
        messages=MESSAGES,
        tools=TOOLS,
        parallel_tool_calls=is_parallel,
        allowed_token_ids=only(hermes, CALL),
        max_tokens=2,
        stop_token_ids=[1],
    )
    (choice,) = whole["choices"]
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["add"] * (1 + is_parallel)
    assert all(json.loads(call["function"]["arguments"]) == {"a": 1} for call in calls)
    assert all(call["type"] == "function" for call in calls)


async def test_tools_and_calls_are_rendered_when_they_are_sent_back(hermes: RunningGateway) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    ]
    answer = await hermes.post("/tokenize", messages=messages, tools=TOOLS)
    text = (await hermes.post("/detokenize", tokens=answer["tokens"]))["prompt"]
    assert text.startswith("<s>[{")
    assert '"name": "add"' in text
    assert text.endswith('[user]1?\n[assistant](add {"a": 1})\n[tool]2=call_1\n[assistant]')


async def test_tokenizer_info_has_special_tokens_and_the_template(hermes: RunningGateway) -> None:
    info = (await hermes.http.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
    assert info["chat_template"] == TEMPLATE
    response = await hermes.http.get("/tokenizer_info", params={"model": "nobody"})
    assert response.status_code == 404


@pytest.mark.parametrize("is_included", [True, False])
async def test_reasoning_is_apart_when_the_prompt_ends_within_it(
    hermes: RunningGateway, is_included: bool
) -> None:
    body = {
        "messages": MESSAGES,
        "allowed_token_ids": only(hermes, "hm"),
        "max_tokens": 3,
        "include_reasoning": is_included,
    }
    plain, _ = await both(hermes, **body)
    assert plain["choices"][0]["message"]["content"] == "hmhmhm"
    whole, _ = await both(hermes, **body, chat_template_kwargs={"thinks": True})
    message = whole["choices"][0]["message"]
    assert message["content"] == ""
    assert message.get("reasoning_content") == ("hmhmhm" if is_included else None)
    assert message.get("reasoning") == message.get("reasoning_content")


@pytest.mark.parametrize(
    ("message", "param", "wanted"),
    [
        ({"content": None}, ".content", "must be a text or a list of text parts in a message of"),
        ({}, "", "must be a text or a list of text parts in a message of role user, but is absent"),
        ({"content": 5}, ".content", "should be a valid string or a list, got 5"),
        *(
            (
                {"content": [{"type": "text", "text": "x"}, {"type": kind, kind: {}}]},
                ".content.1.type",
                f"must be 'text': images, audio and files are not served, got '{kind}'",
            )
            for kind in ("image_url", "input_audio", "file")
        ),
        ({"content": "x", "name": "n" * 10**6}, ".name", "at most 1024 characters"),
        ({"content": "x", "tool_call_id": "n" * 10**6}, ".tool_call_id", "at most 512 characters"),
    ],
)
async def test_message_is_refused_with_what_is_wanted(
    gateway: RunningGateway, message: Json, param: str, wanted: str
) -> None:
    error = await gateway.refusal(PATH, {"messages": [{"role": "user", **message}]})
    assert error["param"] == f"messages.0{param}"
    assert wanted in error["message"]
    assert len(error["message"]) < 300
