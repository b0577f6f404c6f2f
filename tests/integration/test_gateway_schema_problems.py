"""Answers that break a schema which no grammar enforces say so, and keep their text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from executor_service.steps import SAMPLING_FEATURES, Feature
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSE, MESSAGE = "/v1/responses", "/v1/messages"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> #}"
TAGS = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "required": ["tags"],
    "additionalProperties": False,
}
IGNORED = "properties.tags.uniqueItems"
RIGHT, WRONG = '{"tags": ["a", "b"]}', '{"tags": ["a", "a"]}'
PROBLEM = "$.tags: ['a', 'a'] has non-unique elements"
CALLED_RIGHT, CALLED_WRONG = (
    f'<tool_call>\n{{"name": "tag", "arguments": {arguments}}}\n</tool_call>'
    for arguments in (RIGHT, WRONG)
)
FUNCTION = {"name": "tag", "parameters": TAGS}
FORMAT = {"type": "json_schema", "json_schema": {"name": "tags", "schema": TAGS}}
USER = [{"role": "user", "content": "a"}]
ENDINGS = ("", " ", "  ")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """A model whose tokens are whole answers. Its grammars forbid some of any three tokens."""
    texts = (RIGHT, WRONG, CALLED_RIGHT, CALLED_WRONG)
    executor = text_executor(
        tmp_path_factory.mktemp("model"),
        TEMPLATE,
        [text + ending for text in texts for ending in ENDINGS],
        features=SAMPLING_FEATURES | {Feature.GRAMMAR},
        eos_token_ids=(1,),
    )
    async with running_gateway(executor) as running:
        yield running


def saying(gateway: RunningGateway, text: str) -> Json:
    """Returns fields with which the answer is `text`, and perhaps white space."""
    encoded = [gateway.tokenizer.encode(text + end, add_special_tokens=False) for end in ENDINGS]
    return {"allowed_token_ids": [token_id for (token_id,) in encoded]}


async def events(gateway: RunningGateway, path: str, body: Json) -> list[Json]:
    response = await gateway.http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize(("text", "problem"), [(RIGHT, None), (WRONG, PROBLEM)])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_choice_names_its_problem_when_its_schema_is_not_enforced(
    gateway: RunningGateway, path: str, text: str, problem: str | None
) -> None:
    prompt = {"messages": USER} if path == CHAT else {"prompt": "a"}
    body = {**prompt, "max_tokens": 1, "response_format": FORMAT, **saying(gateway, text)}
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    streamed = [event["choices"][0] for event in await events(gateway, path, body)]

    said = choice["message"]["content"] if path == CHAT else choice["text"]
    pieces = [
        each["delta"].get("content", "") if path == CHAT else each["text"] for each in streamed
    ]
    assert said.strip() == "".join(pieces).strip() == text
    assert choice["schema_problem"] == problem
    assert [each["schema_problem"] for each in streamed if each["finish_reason"]] == [problem]
    assert all("schema_problem" not in each for each in streamed if not each["finish_reason"])
    ignored = response.headers["x-splitserve-ignored-fields"]
    assert ignored == f"response_format.json_schema.schema.{IGNORED}"


@pytest.mark.parametrize(("text", "problem"), [(RIGHT, None), (WRONG, PROBLEM)])
async def test_response_names_its_problem_when_its_schema_is_not_enforced(
    gateway: RunningGateway, text: str, problem: str | None
) -> None:
    form = {"type": "json_schema", "name": "tags", "schema": TAGS}
    fields = {"max_output_tokens": 1, "text": {"format": form}}
    body = {"input": "a", **fields, **saying(gateway, text)}
    whole = await gateway.post(RESPONSE, **body)
    *before, last = await events(gateway, RESPONSE, body)

    assert problem is None or whole["output"][0]["content"][0]["text"]
    assert "schema_problem" in whole
    assert last["response"]["schema_problem"] == whole["schema_problem"]
    assert all("schema_problem" not in each.get("response", {}) for each in before)


@pytest.mark.parametrize(
    ("text", "problem"), [(CALLED_RIGHT, None), (CALLED_WRONG, f"tool_calls.0 {PROBLEM}")]
)
async def test_calls_name_their_problem_when_a_schema_is_not_enforced(
    gateway: RunningGateway, text: str, problem: str | None
) -> None:
    said = saying(gateway, text)
    tools = [{"type": "function", "function": FUNCTION}]
    chat = {"messages": USER, "tools": tools, "tool_choice": "required", "max_tokens": 1, **said}
    response = await gateway.http.post(CHAT, json=chat)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    *_, last = await events(gateway, CHAT, chat)

    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["tags"][0] == "a"
    assert choice["schema_problem"] == last["choices"][0]["schema_problem"] == problem
    ignored = response.headers["x-splitserve-ignored-fields"]
    assert ignored == f"tools.0.function.parameters.{IGNORED}"


async def test_message_names_what_is_not_enforced_of_tools(gateway: RunningGateway) -> None:
    body = {
        "model": "fake",
        "messages": USER,
        "max_tokens": 1,
        "tools": [{"name": "tag", "input_schema": TAGS}],
        "tool_choice": {"type": "any"},
    }
    response = await gateway.http.post(MESSAGE, json=body)
    assert response.status_code == 200, response.text

    assert response.headers["x-splitserve-ignored-fields"] == f"tools.0.input_schema.{IGNORED}"


async def test_answer_has_no_finding_when_a_grammar_enforces_its_schema(
    gateway: RunningGateway,
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    answer = await gateway.post(
        CHAT, messages=USER, max_tokens=1, response_format=form, **saying(gateway, WRONG)
    )

    assert "schema_problem" not in answer["choices"][0]
