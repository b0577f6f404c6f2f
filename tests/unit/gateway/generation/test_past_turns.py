"""Past turns of every family are rendered as by transformers, whichever API they came by."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from splitserve_client import ChatTemplateFailed, Model, Tokenizer
from splitserve_gateway.generation import chat_of_messages, chat_request, encode_chat, tools_of
from splitserve_gateway.schemas import ChatRequest, MessagesRequest, ResponsesRequest
from splitserve_gateway.upstreams import ServedByScheduler
from splitserve_text import FORMATS, OutputFormat
from tests.support.models import tiny_tokenizers
from tests.support.models.chat_templates import family_templates
from tests.support.models.template_inputs import ABSENT, inputs_of

Json = dict[str, Any]
TEMPLATES = family_templates()
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
NAMES = ("weather", "time")
IDS = ("abcdefgh1", "abcdefgh2")
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Gets {name}.", "parameters": PARAMETERS},
    }
    for name in NAMES
]
ARGUMENTS: list[Json] = [
    {"city": 'São "Paulo" {é}', "days": 3, "where": {"names": ["a", None, 1.5], "exact": True}},
    {"city": "Oslo's <b> </tool_call>\n漢字"},
]
RESULTS = ('{"celsius": 21}', "12:00")
SYSTEM = "Be brief."
QUESTIONS = ("Weather and time?", "And now?")
THOUGHTS = ("The user wants both.", "Once more.")
ANSWER, ANSWER_THOUGHT = "21 degrees at noon.", "Both are known."


# Changes a list, which the sandbox of transformers refuses, too.
REFUSED = {"kimi_k2_queue": "'append' of 'list' object is unsafe"}
# Several calls in a turn are refused; ours are turns of one call each.
SINGLE = ("llama3", "llama3_builtin")
RENDERED = [name for name in TEMPLATES if name not in REFUSED]
# Text beside calls is dropped, or refused beside reasoning; ours is a message of its own.
DROPPING = {
    *("command_r7b", "deepseek_v3", "granite_20b", "hermes", "json"),
    *("llama3", "llama3_builtin", "llama3_pythonic"),
}


def turn(content: str | None, arguments: Sequence[object], thought: str | None) -> list[Json]:
    """A message with calls, and their results."""
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": values}}
        for call_id, name, values in zip(IDS, NAMES, arguments, strict=False)
    ]
    message: Json = {"role": "assistant", "content": content, "tool_calls": calls}
    if content == ABSENT:
        del message["content"]
    if thought is not None:
        message["reasoning_content"] = thought
    results = zip(calls, RESULTS, strict=False)
    return [
        message,
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in results
        ),
    ]


def chat(content: str | None, arguments: Sequence[object], *, has_reasoning: bool) -> list[Json]:
    """A chat with calls in a past turn, and calls after the last question."""
    before, after, answering = (*THOUGHTS, ANSWER_THOUGHT) if has_reasoning else (None, None, None)
    answer: Json = {"role": "assistant", "content": ANSWER}
    if answering is not None:
        answer["reasoning_content"] = answering
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTIONS[0]},
        *turn(content, arguments, before),
        answer,
        {"role": "user", "content": QUESTIONS[1]},
        *turn(content, arguments, after),
    ]


def as_text(values: object) -> str:
    return json.dumps(values, ensure_ascii=False)


# -- as transformers renders it --------------------------------------------------------------------


@cache
def their_tokenizer() -> Any:  # noqa: ANN401
    untyped: Any = PreTrainedTokenizerFast
    return untyped(tokenizer_object=tiny_tokenizers.byte_level(), **TOKENS)


def theirs(source: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Raises what the template raises."""
    options: Any = {"tools": TOOLS, "chat_template": source, "add_generation_prompt": True}
    messages = copy.deepcopy(list(messages))
    if all(message.get("content", "") is not None for message in messages):
        return str(their_tokenizer().apply_chat_template(messages, tokenize=False, **options))
    # `apply_chat_template` drops null contents, for which some templates look.
    return str(render_jinja_template([messages], **options, **TOKENS)[0][0])


def expected(name: str, messages: Sequence[Mapping[str, Any]]) -> str:
    if name in SINGLE:
        messages = one_by_one(messages)
    return theirs(TEMPLATES[name], inputs_of(name, messages))


def one_by_one(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Turns with one call each, followed by its result."""
    turns: list[Json] = []
    for index, message in enumerate(messages):
        calls = message.get("tool_calls", ())
        if message["role"] == "tool":
            continue
        turns += [{**message, "tool_calls": [call]} for call in calls[:1]] or [dict(message)]
        for number, call in enumerate(calls):
            if number:
                turns.append({"role": "assistant", "tool_calls": [call]})
            turns.append(dict(messages[index + 1 + number]))
    return turns


# -- as the gateway renders it ---------------------------------------------------------------------


@cache
def served(source: str) -> ServedByScheduler:
    config = {"chat_template": source, **TOKENS}
    tokenizer = Tokenizer.from_files(
        {
            "tokenizer.json": tiny_tokenizers.byte_level().to_str().encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        }
    )
    return ServedByScheduler(Model("m", "d", "float32", 500, 100_000, ()), tokenizer)


async def rendered(name: str, body: ChatRequest) -> str:
    use = await tools_of(body)
    model = served(TEMPLATES[name])
    prompt = await encode_chat(body, model, use.template_tools)
    assert model.tokenizer is not None
    return model.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


async def ours(name: str, messages: Sequence[Json]) -> str:
    return await rendered(name, ChatRequest.model_validate({"messages": messages, "tools": TOOLS}))


def parts(message: Json) -> list[Json]:
    """The text and the calls of a message as two messages."""
    if "tool_calls" not in message:
        return [message]
    calls = {key: value for key, value in message.items() if key != "content"}
    return [{"role": "assistant", "content": message["content"]}, calls]


def test_every_notation_has_a_template() -> None:
    shown = [OutputFormat.of(source).tool_calls for source in TEMPLATES.values()]
    assert {found.name for found in shown if found} == set(FORMATS)


@pytest.mark.parametrize("name", RENDERED)
async def test_past_calls_are_those_of_transformers_in_every_form(name: str) -> None:
    values: Sequence[object] = ARGUMENTS
    texts: Sequence[object] = list(map(as_text, values))
    forms = [
        (content, arguments, True)
        for content, arguments in itertools.product((None, "", ABSENT), (values, texts))
    ]
    for content, arguments, has_reasoning in [*forms, (None, texts, False)]:
        messages = chat(content, arguments, has_reasoning=has_reasoning)

        assert await ours(name, messages) == expected(name, messages), (content, arguments)


@pytest.mark.parametrize("name", REFUSED)
async def test_calls_are_refused_when_transformers_refuses_them(name: str) -> None:
    messages = chat(None, ARGUMENTS, has_reasoning=False)
    with pytest.raises(Exception, match=REFUSED[name]):
        expected(name, messages)

    with pytest.raises(ChatTemplateFailed, match=REFUSED[name]):
        await ours(name, messages)


@pytest.mark.parametrize("name", RENDERED)
async def test_text_beside_calls_is_a_message_when_the_template_drops_it(name: str) -> None:
    for has_reasoning in (False, True):
        messages = chat("I look.", ARGUMENTS, has_reasoning=has_reasoning)
        is_split = name in DROPPING or (name == "gpt_oss" and has_reasoning)
        split = list(itertools.chain(*map(parts, messages))) if is_split else messages

        assert await ours(name, messages) == expected(name, split)


# -- as other APIs bring it ------------------------------------------------------------------------


def by_messages() -> ChatRequest:
    """The chat by Anthropic's API."""

    def blocks(thought: str) -> list[Json]:
        uses = [
            {"type": "tool_use", "id": call_id, "name": name, "input": values}
            for call_id, name, values in zip(IDS, NAMES, ARGUMENTS, strict=True)
        ]
        return [{"type": "thinking", "thinking": thought, "signature": "s"}, *uses]

    results = [
        {"type": "tool_result", "tool_use_id": call_id, "content": result}
        for call_id, result in zip(IDS, RESULTS, strict=True)
    ]
    answer = [
        {"type": "thinking", "thinking": ANSWER_THOUGHT, "signature": "s"},
        {"type": "text", "text": ANSWER},
    ]
    turns = [
        ("user", QUESTIONS[0]),
        ("assistant", blocks(THOUGHTS[0])),
        ("user", results),
        ("assistant", answer),
        ("user", QUESTIONS[1]),
        ("assistant", blocks(THOUGHTS[1])),
        ("user", results),
    ]
    tools = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"]["description"],
            "input_schema": tool["function"]["parameters"],
        }
        for tool in TOOLS
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    body = {"system": SYSTEM, "messages": messages, "tools": tools, "max_tokens": 5}
    return chat_of_messages(MessagesRequest.model_validate(body), 5)


def by_responses() -> ChatRequest:
    """The chat by OpenAI's Responses API."""

    def reasoning(thought: str) -> Json:
        content = [{"type": "reasoning_text", "text": thought}]
        return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}

    def items(thought: str) -> list[Json]:
        calls = [
            {
                "type": "function_call",
                "call_id": call_id,
                "name": name,
                "arguments": as_text(values),
            }
            for call_id, name, values in zip(IDS, NAMES, ARGUMENTS, strict=True)
        ]
        outputs = [
            {"type": "function_call_output", "call_id": call_id, "output": result}
            for call_id, result in zip(IDS, RESULTS, strict=True)
        ]
        return [reasoning(thought), *calls, *outputs]

    answer = {"type": "output_text", "text": ANSWER, "annotations": []}
    body = {
        "instructions": SYSTEM,
        "input": [
            {"role": "user", "content": QUESTIONS[0]},
            *items(THOUGHTS[0]),
            reasoning(ANSWER_THOUGHT),
            {"type": "message", "role": "assistant", "content": [answer]},
            {"role": "user", "content": QUESTIONS[1]},
            *items(THOUGHTS[1]),
        ],
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
    }
    return chat_request(ResponsesRequest.model_validate(body))


@pytest.mark.parametrize("name", RENDERED)
async def test_prompt_is_the_same_when_the_chat_comes_by_another_api(name: str) -> None:
    prompt = await ours(name, chat(None, ARGUMENTS, has_reasoning=True))

    assert await rendered(name, by_messages()) == prompt
    assert await rendered(name, by_responses()) == prompt
