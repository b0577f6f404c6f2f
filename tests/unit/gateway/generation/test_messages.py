"""Messages API bodies as chats."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from splitserve_gateway.generation import chat_of_messages, message_fields
from splitserve_gateway.http import ApiError, refusal_of
from splitserve_gateway.schemas import ChatRequest, MessagesRequest

USER = {"role": "user", "content": "the fox?"}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def chat_of(**fields: Any) -> ChatRequest:  # noqa: ANN401
    body = MessagesRequest.model_validate({"messages": [USER], "max_tokens": 5, **fields})
    return chat_of_messages(body, body.max_tokens)


def messages_of(*messages: object, **fields: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    chat = chat_of(messages=list(messages), **fields)
    return [message.model_dump(exclude_none=True) for message in chat.messages or ()]


def text(value: str, **fields: object) -> dict[str, object]:
    return {"type": "text", "text": value, **fields}


def test_chat_has_system_turns_calls_and_results() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": [1, {"b": "}"}]}}
    also: Any = {"type": "tool_use", "id": "c2", "name": "stop", "input": {}, "caller": None}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [text("2"), text("3")]}
    failed = {"type": "tool_result", "tool_use_id": "c2", "is_error": True, **CACHED}

    messages = messages_of(
        {"role": "user", "content": [text("1?", **CACHED), text("2?")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("I "),
                text("add."),
                call,
                also,
            ],
        },
        {"role": "user", "content": [text("quick"), result, failed, text("!")]},
        {"role": "user", "content": "please"},
        {"role": "system", "content": [text("be nice")]},
        system=[text("be"), text("brief", **CACHED)],
    )

    assert messages == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "1?\n2?"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "I add.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": [1, {"b": "}"}]}},
                },
                {"id": "c2", "type": "function", "function": {"name": "stop", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "2\n3", "tool_call_id": "c1"},
        {"role": "tool", "content": "error", "tool_call_id": "c2"},
        {"role": "user", "content": "quick\n!\nplease"},
        {"role": "system", "content": "be nice"},
    ]


def test_chat_drops_the_billing_line_of_claude_code() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1.0; cch=a1b2c;")

    assert messages_of(USER, system=[billing, text("be brief")]) == messages_of(
        USER, system="be brief"
    )
    assert messages_of(USER, system=[billing]) == messages_of(USER)


@pytest.mark.parametrize(
    ("content", "is_continued"),
    [
        ("It is", True),
        ([text("It "), text("is")], True),
        ("", False),
        ([text("It"), {"type": "tool_use", "id": "a", "name": "b", "input": {}}], False),
    ],
)
def test_answer_continues_the_last_message_when_it_is_the_assistants(
    content: object, is_continued: bool
) -> None:
    chat = chat_of(messages=[USER, {"role": "assistant", "content": content}])

    assert chat.continue_final_message is is_continued
    assert not chat_of().continue_final_message


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, True),
    ],
)
def test_tools_are_those_of_chats(choice: object, expected: object, is_parallel: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"name": "f", "description": "d", "input_schema": schema, "strict": True, **CACHED}

    chat = chat_of(tools=[tool, {**tool, "type": "custom", "name": "g"}], tool_choice=choice)

    first, second = (each.function for each in chat.tools or ())
    assert (first.name, first.description, first.strict) == ("f", "d", True)
    assert (first.parameters, second.name) == (schema, "g")
    shape = chat.tool_choice
    assert (shape if isinstance(shape, str | None) else shape.model_dump()) == expected
    assert chat.parallel_tool_calls is is_parallel


@pytest.mark.parametrize(
    ("thinking", "is_thinking"),
    [
        (None, None),
        ({"type": "adaptive", "display": "omitted"}, None),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking_is_that_of_chats(
    thinking: dict[str, Any] | None, is_thinking: bool | None
) -> None:
    chat = chat_of(thinking=thinking, chat_template_kwargs={"thinking": True})
    assert chat.is_thinking is is_thinking
    assert chat.chat_template_kwargs == {"thinking": True}


def test_sampling_and_scheduling_are_those_of_chats() -> None:
    chat = chat_of(
        stop_sequences=["\n"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        user="a tenant",
        priority=4,
        deadline_s=2.5,
        target_itl_ms=40,
        output_config={"effort": "low", "task_budget": {"total": 5}},
        metadata={"user_id": "u" * 300},
    )

    assert (chat.max_tokens, chat.stops, chat.reasoning_effort) == (5, ["\n"], "low")
    assert chat.user == "a tenant"
    shape = chat.model_dump(warnings=False)
    assert [shape[name] for name in ("temperature", "top_p", "top_k")] == [0.5, 0.9, 3]
    assert (chat.priority, chat.deadline_s, chat.target_itl_ms) == (4, 2.5, 40)
    others = ChatRequest.model_construct().model_dump().keys()
    assert shape.keys() == others


@pytest.mark.parametrize(("effort", "expected"), [("medium", "medium"), ("max", "high")])
def test_effort_is_one_that_templates_know(effort: str, expected: str) -> None:
    assert chat_of(output_config={"effort": effort}).reasoning_effort == expected


@pytest.mark.parametrize("field", ["output_config.format", "output_format"])
def test_output_schema_is_that_of_a_response_format(field: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    outer, _, inner = field.partition(".")
    body = {"messages": [USER], "max_tokens": 5, outer: {inner: form} if inner else form}

    made = MessagesRequest.model_validate(body)

    wanted = {"name": "output", "schema": {"type": "object"}, "strict": True}
    expected = {"type": "json_schema", "json_schema": wanted}
    assert chat_of_messages(made, 5).response_format == expected
    assert message_fields(made)["response_format"] == message_fields(made)["grammar"] == field


def test_choice_of_a_tool_is_refused_without_its_name() -> None:
    with pytest.raises(ApiError, match="name is required"):
        chat_of(tool_choice={"type": "tool"})


KINDS = ("image", "document", "search_result", "server_tool_use", "container_upload", None, 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["user", "assistant", "system", "result"])
def test_block_is_refused_by_its_name_when_it_is_not_served(role: str, kind: object) -> None:
    content: Any = [text("a"), {"type": kind, "source": {}}]
    where = "messages.0.content.1.type"
    if role == "result":
        content = [{"type": "tool_result", "tool_use_id": "a", "content": content}]
        role, where = "user", "messages.0.content.0.content.1.type"

    with pytest.raises(ValidationError) as refused:
        messages_of({"role": role, "content": content})

    error = refusal_of(refused.value)
    assert error.param == where
    assert error.message.startswith(f"{where}: must be 'text'")
    assert "images, documents" in error.message
    assert error.message.endswith(f"got {kind!r}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
        ({"messages": [USER] * 5000}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"mcp_servers": [{"type": "url", "url": "http://x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"frob": 1}, "frob"),
        ({"stop": ["x"]}, "stop"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
    ],
)
def test_field_is_named_when_it_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as refused:
        chat_of(**fields)

    error = refusal_of(refused.value)
    assert error.param == param
    assert param in error.message
    assert len(error.message) < 300
