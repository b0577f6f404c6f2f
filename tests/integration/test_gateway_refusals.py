"""Refusals of each endpoint name the field; ignored fields are named in a header."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from executor_service.steps import SAMPLING_FEATURES, Feature
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] == 'fail' %}"
    "{{ raise_exception('no such talk') }}{% endif %}{{ message['content'] }}{% endfor %}"
    "{# <tool_call> #}"
)
COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def user(content: object) -> list[Json]:
    return [{"role": "user", "content": content}]


PLAIN: dict[str, Json] = {
    COMPLETION: {"prompt": "a"},
    CHAT: {"messages": user("a")},
    RESPONSE: {"input": "a"},
}
DEEP: Any = "leaf"
for _ in range(65):
    DEEP = {"a": DEEP}


def chat_tool(**function: object) -> Json:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def response_tool(**function: object) -> Json:
    return {"tools": [{"type": "function", "name": "f", **function}]}


def chat_schema(**form: object) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", **form}}}


def response_schema(**form: object) -> Json:
    return {"text": {"format": {"type": "json_schema", "name": "s", **form}}}


ODD = {"type": "object", "not": {"required": ["a"]}}
# What is wrong: for each endpoint the fields, and which of them is at fault.
REFUSED: dict[str, dict[str, tuple[Json, str]]] = {
    "template fails": {
        CHAT: ({"messages": user("fail")}, "messages"),
        RESPONSE: ({"input": "fail"}, "input"),
    },
    "nothing to answer": {
        COMPLETION: ({"prompt": ""}, "prompt"),
        CHAT: ({"messages": []}, "messages"),
        RESPONSE: ({"input": []}, "input"),
    },
    "rendered to nothing": {
        CHAT: ({"messages": user("")}, "messages"),
        RESPONSE: ({"input": ""}, "input"),
    },
    "too long": {
        COMPLETION: ({"prompt": "x " * 3000}, "prompt"),
        CHAT: ({"messages": user("x " * 3000)}, "messages"),
        RESPONSE: ({"input": "x " * 3000}, "input"),
    },
    "far too long": {
        COMPLETION: ({"prompt": "x" * 300_000}, "prompt"),
        CHAT: ({"messages": user("x" * 300_000)}, "messages"),
        RESPONSE: ({"input": "x" * 300_000}, "input"),
    },
    "too many tokens": {
        COMPLETION: ({"prompt": None, "prompt_token_ids": [5] * 1025}, "prompt_token_ids"),
        CHAT: ({"messages": None, "prompt_token_ids": [5] * 1025}, "prompt_token_ids"),
    },
    "no such token": {
        COMPLETION: ({"prompt": [5000]}, "prompt"),
        CHAT: ({"messages": None, "prompt_token_ids": [5000]}, "prompt_token_ids"),
    },
    "no tokens wanted": {
        COMPLETION: ({"max_tokens": 0}, "max_tokens"),
        CHAT: ({"max_completion_tokens": 0}, "max_completion_tokens"),
        RESPONSE: ({"max_output_tokens": 0}, "max_output_tokens"),
    },
    "no tokens wanted, by the older name": {CHAT: ({"max_tokens": 0}, "max_tokens")},
    "too many scores": {
        COMPLETION: ({"logprobs": 21}, "logprobs"),
        CHAT: ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        RESPONSE: (
            {"include": ["message.output_text.logprobs"], "top_logprobs": 21},
            "top_logprobs",
        ),
    },
    "unknown field of a tool": {
        CHAT: (chat_tool(frob=1), "tools.0.function.frob"),
        RESPONSE: (response_tool(frob=1), "tools.0.frob"),
    },
    "tool's name": {
        CHAT: (chat_tool(name="a b"), "tools.0.function.name"),
        RESPONSE: (response_tool(name="a b"), "tools.0.name"),
    },
    "tool's parameters are no object's": {
        CHAT: (chat_tool(parameters={"type": "array"}), "tools.0.function.parameters.type"),
        RESPONSE: (response_tool(parameters={"type": "array"}), "tools.0.parameters.type"),
    },
    "tool's schema cannot be compiled": {
        CHAT: (chat_tool(parameters=ODD, strict=True), "tools.0.function.parameters"),
        RESPONSE: (response_tool(parameters=ODD, strict=True), "tools.0.parameters"),
    },
    "tool is nested too deeply": {
        CHAT: (chat_tool(parameters=DEEP), "tools.0.function.parameters"),
        RESPONSE: (response_tool(parameters=DEEP), "tools.0.parameters"),
    },
    "template's variables are nested too deeply": {
        CHAT: ({"chat_template_kwargs": DEEP}, "chat_template_kwargs"),
        RESPONSE: ({"chat_template_kwargs": DEEP}, "chat_template_kwargs"),
    },
    "template's variables are fields": {
        CHAT: ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        RESPONSE: ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    },
    "schema is nested too deeply": {
        COMPLETION: ({"guided_json": DEEP}, "guided_json"),
        CHAT: (chat_schema(schema=DEEP), "response_format"),
        RESPONSE: (response_schema(schema=DEEP), "text.format"),
    },
    "tool that is not there": {
        CHAT: (
            {**chat_tool(), "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        RESPONSE: (
            {**response_tool(), "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice.name",
        ),
    },
    "allowed tool that is not there": {
        CHAT: (
            {
                **chat_tool(),
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto",
                        "tools": [{"type": "function", "function": {"name": "g"}}],
                    },
                },
            },
            "tool_choice.allowed_tools.tools.0.function.name",
        ),
        RESPONSE: (
            {
                **response_tool(),
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tool_choice.tools.0.name",
        ),
    },
    "unknown choice": {
        CHAT: ({**chat_tool(), "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        RESPONSE: ({**response_tool(), "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    },
    "unknown format": {
        COMPLETION: ({"response_format": {"type": "xml"}}, "response_format.type"),
        CHAT: ({"response_format": {"type": "xml"}}, "response_format.type"),
        RESPONSE: ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    },
    "unknown field of a format": {
        CHAT: (chat_schema(frob=1), "response_format.json_schema.frob"),
        RESPONSE: (response_schema(frob=1), "text.format.frob"),
    },
    "schema that cannot be compiled": {
        CHAT: (chat_schema(schema=ODD, strict=True), "response_format.json_schema.schema"),
        RESPONSE: (response_schema(schema=ODD, strict=True), "text.format.schema"),
    },
    "grammar without an end": {
        COMPLETION: ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        CHAT: ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        RESPONSE: ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    },
    "beams with a grammar": {
        COMPLETION: ({"guided_choice": ["a"], "use_beam_search": True}, "guided_choice"),
        CHAT: ({"guided_regex": "a", "use_beam_search": True}, "guided_regex"),
        RESPONSE: (
            {"text": {"format": {"type": "json_object"}}, "use_beam_search": True},
            "text.format",
        ),
    },
    "words that are too many tokens": {
        path: ({"bad_words": ["\x01" * (1000 - number) for number in range(9)]}, "bad_words")
        for path in PLAIN
    },
    "too many words": {path: ({"bad_words": ["a"] * 513}, "bad_words") for path in PLAIN},
    "too many ends": {path: ({"stop": ["a"] * 65}, "stop") for path in PLAIN},
    "end that is too long": {path: ({"stop": ["a", "b" * 1025]}, "stop.1") for path in PLAIN},
    "unknown option of streams": {
        path: ({"stream_options": {"frob": 1}}, "stream_options.frob") for path in PLAIN
    },
}
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
# What is wrong with one field of one endpoint.
OF_ONE_ENDPOINT: dict[str, list[tuple[Json, str]]] = {
    COMPLETION: [
        ({"suffix": "x"}, "suffix"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 2**31}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"406": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
        ({"stop": [1]}, "stop.0"),
        ({"stop": "a" * 1025}, "stop"),
        ({"user": "u" * 129}, "user"),
        ({"priority": 101}, "priority"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [406]}, "allowed_token_ids"),
        ({"stop_token_ids": [406]}, "stop_token_ids"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": True, "n": 2, "top_k": 3}, "top_k"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 128}, "n"),
        ({"prompt_token_ids": [1]}, "prompt"),
    ],
    CHAT: [
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "frob": 1}]}, "messages.0.frob"),
        ({"messages": user("x") * 4097}, "messages"),
        ({"messages": user([{"type": "image_url"}])}, "messages.0.content.0.type"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"functions": []}, "functions"),
        ({"audio": {}}, "audio"),
        ({"chat_template": "x"}, "chat_template"),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"response_format": 5}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
    RESPONSE: [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools.0.type"),
        ({"n": 2}, "n"),
        ({"surprise": 1}, "surprise"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"input": user([{"type": "input_image"}])}, "input.0.content.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"truncation": "middle"}, "truncation"),
    ],
}
CASES = [
    *(
        pytest.param(path, *case, id=f"{name}, {path}")
        for name, cases in REFUSED.items()
        for path, case in cases.items()
    ),
    *(
        pytest.param(path, *case, id=f"{number}, {path}")
        for path, cases in OF_ONE_ENDPOINT.items()
        for number, case in enumerate(cases)
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    executor = text_executor(
        tmp_path_factory.mktemp("files"),
        TEMPLATE,
        features=SAMPLING_FEATURES | {Feature.GRAMMAR},
        eos_token_ids=(1,),
    )
    async with running_gateway(executor) as running:
        yield running


@pytest.mark.parametrize(("path", "fields", "param"), CASES)
async def test_refusal_names_the_field_as_its_endpoint_does(
    gateway: RunningGateway, path: str, fields: Json, param: str
) -> None:
    whole = await gateway.refusal(path, {**PLAIN[path], **fields})
    streamed = await gateway.refusal(path, {**PLAIN[path], **fields, "stream": True})

    assert (whole["type"], whole["param"]) == ("invalid_request_error", param)
    assert len(whole["message"]) < 600
    assert streamed == whole
    others = {"messages", "response_format", "max_completion_tokens"} - fields.keys()
    assert not any(f"{name} " in whole["message"] for name in others - PLAIN[path].keys())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETION, {"prompt": "a", "stream": "yes"}, "stream"),
        (COMPLETION, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETION, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"messages": user("a"), "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (TOKENIZE, {}, "prompt"),
        (TOKENIZE, {"prompt": "a", "messages": []}, "prompt"),
        (TOKENIZE, {"messages": []}, "messages"),
        (TOKENIZE, {"prompt": "a", "frobnicate": 1}, "frobnicate"),
        (TOKENIZE, {"prompt": "a" * 300_000}, "prompt"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens.0"),
        (DETOKENIZE, {}, "tokens"),
    ],
)
async def test_refusal_names_the_field_when_sent_one_way(
    gateway: RunningGateway, path: str, body: Json, param: str
) -> None:
    assert (await gateway.refusal(path, body))["param"] == param


PARTS = [
    {"type": "text", "text": "a"},
    {"type": "text", "text": "b", "prompt_cache_breakpoint": {}},
]
ANNOTATED = {"role": "assistant", "content": "c", "annotations": []}
SCHEMA = "response_format.json_schema.schema"
IGNORED_OF_MESSAGES = "messages.annotations, messages.content.prompt_cache_breakpoint"
CALLED: Json = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
CALLED |= {"async": False, "status": "completed"}


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (COMPLETION, {"store": True, "metadata": {"a": "b"}}, "metadata, store"),
        (COMPLETION, {"store": None}, None),
        (CHAT, {"messages": [*user(PARTS), ANNOTATED, ANNOTATED]}, IGNORED_OF_MESSAGES),
        (
            RESPONSE,
            {
                "input": [CALLED, *user("a")],
                "stream_options": {"include_obfuscation": False},
                "metadata": {"a": "b"},
            },
            "input.async, input.status, stream_options.include_obfuscation",
        ),
        (COMPLETION, {**chat_schema(schema=ODD), "store": 1}, f"{SCHEMA}.not, store"),
        (CHAT, {**chat_schema(schema=ODD), "store": 1}, f"{SCHEMA}.not, store"),
        (RESPONSE, {**response_schema(schema=ODD), "store": 1}, "store, text.format.schema.not"),
    ],
)
async def test_answer_names_what_was_ignored(
    gateway: RunningGateway, path: str, fields: Json, ignored: str | None
) -> None:
    tokens = "max_output_tokens" if path == RESPONSE else "max_tokens"
    for is_stream in (False, True):
        body = {**PLAIN[path], tokens: 1, **fields, "stream": is_stream}
        response = await gateway.http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.headers.get("x-splitserve-ignored-fields") == ignored


async def test_tokens_of_a_chat_name_what_was_ignored(gateway: RunningGateway) -> None:
    response = await gateway.http.post(TOKENIZE, json={"messages": [ANNOTATED]})
    assert response.headers["x-splitserve-ignored-fields"] == "messages.annotations"
