"""Requests of well-known clients are accepted; fields without effect are named in a header."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from executor_service.steps import SAMPLING_FEATURES, Feature
from splitserve_gateway.config import GatewayConfig
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TEMPLATE = (
    "{% for message in messages %}{{ message }}\n{% endfor %}{{ tools }}"
    "<enable_thinking={{ enable_thinking }} thinking={{ thinking }}>{# <tool_call> #}"
)
EPHEMERAL = {"type": "ephemeral"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL: Json = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def user(content: object = "a", **fields: object) -> Json:
    return {"role": "user", "content": content, **fields}


PLAIN: dict[str, Json] = {
    COMPLETION: {"prompt": "a", "max_tokens": 1},
    CHAT: {"messages": [user()], "max_tokens": 1},
    RESPONSE: {"input": "a", "max_output_tokens": 1},
}
# Fields that clients send unasked: for each, its path in the header; None if it is not named there.
OF_ALL: list[tuple[Json, str | None]] = [
    ({"verbosity": "low"}, "verbosity"),
    ({"keep_alive": "5m", "num_ctx": 4096}, "keep_alive, num_ctx"),
    ({"provider": {"order": ["x"]}, "transforms": []}, "provider, transforms"),
    ({"prediction": None, "safety_identifier": "x"}, "safety_identifier"),
    ({"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
     "prompt_cache_key, prompt_cache_retention"),
    ({"frobnicate": None, "extra_body": None}, None),
]  # fmt: skip
OF_EACH: dict[str, list[tuple[Json, str | None]]] = {
    COMPLETION: [({"suffix": ""}, None), ({"suffix": None}, None)],
    CHAT: [
        ({"messages": [user([{"type": "text", "text": "a", "cache_control": EPHEMERAL}])]},
         "messages.content.cache_control"),
        ({"messages": [user(cache_control=EPHEMERAL, id="m1")]},
         "messages.cache_control, messages.id"),
        ({"tools": [{**TOOL, "cache_control": EPHEMERAL}]}, "tools.cache_control"),
        ({"tools": [{**TOOL, "function": {**FUNCTION, "cache_control": EPHEMERAL}}]},
         "tools.function.cache_control"),
        ({"tools": [{**TOOL, "frob": None}], "tool_choice": None}, None),
        ({"messages": [
            user(),
            {"role": "assistant", "content": "b", "reasoning_details": [{"text": "c"}],
             "refusal": None, "annotations": None, "audio": None, "function_call": None,
             "tool_calls": None, "images": None, "thinking_blocks": None},
            user(name=None, tool_call_id=None),
        ]}, "messages.reasoning_details"),
        ({"enable_thinking": False}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"stream_options": None, "response_format": {"type": "text", "json_schema": None}}, None),
    ],
    RESPONSE: [
        ({"client_metadata": {"thread_id": "a"}}, "client_metadata"),
        (
            {
                "tools": [
                    {"type": "function", **FUNCTION},
                    {"type": "namespace", "name": "n", "tools": [{"type": "function"}]},
                    {"type": "web_search", "external_web_access": True},
                ]
            },
            "tools.namespace, tools.web_search",
        ),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": "disabled"}, None),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"enable_thinking": True}, None),
        ({"input": [user([{"type": "input_text", "text": "a", "cache_control": EPHEMERAL}])]},
         "input.content.cache_control"),
        ({"tools": [{"type": "function", **FUNCTION, "cache_control": EPHEMERAL}]},
         "tools.cache_control"),
    ],
}  # fmt: skip
CASES = [
    *((path, *case) for path in PLAIN for case in OF_ALL),
    *((path, *case) for path, cases in OF_EACH.items() for case in cases),
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


def ignored_of(response: httpx2.Response) -> str | None:
    """The header of an answer, which must be a 200."""
    assert response.status_code == 200, response.text
    ignored: str | None = response.headers.get("x-splitserve-ignored-fields")
    return ignored


async def rendered(gateway: RunningGateway, **body: object) -> str:
    """The prompt of a chat."""
    tokens = (await gateway.post("/tokenize", **{"messages": [user()], **body}))["tokens"]
    return str((await gateway.post("/detokenize", tokens=tokens))["prompt"])


@pytest.mark.parametrize(("path", "fields", "ignored"), CASES)
async def test_request_is_accepted_when_clients_send_unused_fields(
    gateway: RunningGateway, path: str, fields: Json, ignored: str | None
) -> None:
    for is_stream in (False, True):
        body = {**PLAIN[path], **fields, "stream": is_stream}
        assert ignored_of(await gateway.http.post(path, json=body)) == ignored


async def test_tool_at_fault_is_named_when_others_are_ignored(gateway: RunningGateway) -> None:
    tools = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {"type": 7}}]
    body = {**PLAIN[RESPONSE], "tools": tools, "tool_choice": "required"}
    assert (await gateway.refusal(RESPONSE, body))["param"].startswith("tools.1.")
    body["tools"] = [{"type": "code_interpreter"}]
    assert (await gateway.refusal(RESPONSE, body))["param"] == "tools.0.type"


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, ("", "")),
        ({"enable_thinking": True}, ("True", "True")),
        ({"thinking": False}, ("False", "False")),
        ({"thinking": {"type": "enabled"}}, ("True", "True")),
        ({"thinking": {"type": "disabled"}}, ("False", "False")),
        ({"thinking": {"type": "adaptive"}}, ("", "")),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, ("False", "False")),
        (
            {"thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            ("False", "True"),
        ),
    ],
)
async def test_template_knows_whether_to_think_when_a_field_says_so(
    gateway: RunningGateway, fields: Json, variables: tuple[str, str]
) -> None:
    enabled, thinking = variables
    expected = f"<enable_thinking={enabled} thinking={thinking}>"
    assert (await rendered(gateway, **fields)).endswith(expected)


async def test_thinking_is_refused_when_its_type_is_unknown(gateway: RunningGateway) -> None:
    body = {**PLAIN[CHAT], "thinking": {"type": "a lot"}}
    assert (await gateway.refusal(CHAT, body))["param"] == "thinking.type"


async def test_template_sees_no_ignored_field(gateway: RunningGateway) -> None:
    tool = {**TOOL, "function": {**FUNCTION, "cache_control": EPHEMERAL}}
    call = {**CALL, "index": 0, "function": {**CALL["function"], "parsed_arguments": {}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "id": "m"}
    with_them = await rendered(gateway, tools=[tool], messages=[user(), answer])
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert with_them == await rendered(gateway, tools=[TOOL], messages=[user(), answer])


async def test_answer_can_be_sent_back_when_dumped_by_the_client(gateway: RunningGateway) -> None:
    client = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x")
    async with client:
        forced: Any = {"type": "function", "function": {"name": "f"}}
        first = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "a"}], max_tokens=300,
            tools=[TOOL], tool_choice=forced,  # type: ignore[list-item]
        )  # fmt: skip
        message: Any = first.choices[0].message.model_dump()
        # Fields that the client knows are null, whether or not the answer has them.
        assert {"audio", "function_call", "annotations"} <= message.keys()
        again = await client.chat.completions.with_raw_response.create(
            model="fake", messages=[{"role": "user", "content": "a"}, message], max_tokens=1
        )
        assert "x-splitserve-ignored-fields" not in again.headers
        response = await client.responses.create(model="fake", input="a", max_output_tokens=9)
        items: Any = [item.model_dump() for item in response.output]
        items.append(user())
        await client.responses.create(model="fake", input=items, max_output_tokens=1)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETION, {"prompt": [5] * 1024}),
        (COMPLETION, {"prompt": "x" * 300_000}),
        (CHAT, {"messages": [user("x " * 3000)]}),
        (RESPONSE, {"input": "x " * 3000}),
    ],
)
async def test_overflow_is_told_in_the_words_that_clients_look_for(
    gateway: RunningGateway, path: str, fields: Json
) -> None:
    error = await gateway.refusal(path, {**PLAIN[path], **fields})
    assert error["code"] == "context_length_exceeded"
    assert "This model's maximum context length is 1024 tokens" in error["message"]


# -- `--unknown-fields ignore` ---------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lenient(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    executor = text_executor(tmp_path_factory.mktemp("lenient"), TEMPLATE)
    async with running_gateway(executor, config=GatewayConfig(unknown_fields="ignore")) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (COMPLETION, {"frob": [{"a": 1}], "naught": None}, "frob"),
        (CHAT, {"messages": [user(frob=1), user(frob=2)]}, "messages.frob"),
        (RESPONSE, {"input": [user(frob={})], "reasoning": {"frob": 0}},
         "input.frob, reasoning.frob"),
        (COMPLETION, {"é\r\nx-evil: 1": 1, "stops": ["a"]},
         r"\xe9\r\nx-evil: 1, stops"),
        (COMPLETION, {"model_fields_set": 1, "prompts": [1], "x" * 500: 1},
         f"model_fields_set, prompts, {'x' * 80}"),
    ],
)  # fmt: skip
async def test_unknown_field_is_ignored_and_named_when_so_configured(
    lenient: RunningGateway, path: str, fields: Json, ignored: str
) -> None:
    for is_stream in (False, True):
        body = {**PLAIN[path], **fields, "stream": is_stream}
        assert ignored_of(await lenient.http.post(path, json=body)) == ignored


async def test_header_is_bounded_when_very_many_fields_are_unknown(lenient: RunningGateway) -> None:
    body = {**PLAIN[COMPLETION], **{f"f{number}": 1 for number in range(60_000)}}
    ignored = ignored_of(await lenient.http.post(COMPLETION, json=body))
    assert ignored is not None
    assert (ignored.count(", "), ignored[-3:]) == (64, "...")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"temperature": "hot"}, "temperature"), ({"suffix": "x"}, "suffix")],
)
async def test_known_field_is_refused_when_wrong_and_unknown_ones_are_ignored(
    lenient: RunningGateway, fields: Json, param: str
) -> None:
    error = await lenient.refusal(COMPLETION, {**PLAIN[COMPLETION], **fields, "frob": 1})
    assert error["param"] == param


async def test_template_sees_no_unknown_field(lenient: RunningGateway) -> None:
    call = {**CALL, "frob": 1, "function": {**CALL["function"], "frob": 1}}
    tool = {"type": "function", "function": {**FUNCTION, "frob": 1}, "frob": 1}
    answer = {"role": "assistant", "content": "b", "tool_calls": [call], "frob": 1}
    with_them = await rendered(lenient, tools=[tool], messages=[user(frob=1), answer])
    assert "frob" not in with_them
    answer = {"role": "assistant", "content": "b", "tool_calls": [CALL]}
    assert with_them == await rendered(lenient, tools=[TOOL], messages=[user(), answer])
