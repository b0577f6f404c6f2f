"""Tools and tool choices, of Chat and of Responses."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from splitserve_gateway.grammars.requested import GrammarRefused
from splitserve_gateway.grammars.tools import ToolUse, tool_use
from splitserve_gateway.schemas.chat import MAX_TOOLS

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"properties": {}}}
TOOLS = [WEATHER, ADD]


@pytest.mark.parametrize(
    ("choice", "shown", "callable_names", "must_call"),
    [
        (None, 2, ["get_weather", "add"], False),
        ("auto", 2, ["get_weather", "add"], False),
        ("none", 0, [], False),
        ("required", 2, ["get_weather", "add"], True),
        ({"type": "function", "function": {"name": "add"}}, 2, ["add"], True),
        ({"type": "function", "name": "get_weather"}, 2, ["get_weather"], True),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "add"}] * 2,
            },
            2,
            ["add"],
            False,
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "add"}}]},
            },
            2,
            ["add"],
            True,
        ),
    ],
)
def test_choice_says_what_may_be_called(
    choice: object, shown: int, callable_names: list[str], must_call: bool
) -> None:
    use = tool_use(TOOLS, choice, None)

    assert len(use.template_tools or []) == shown
    assert [tool.name for tool in use.callable_tools] == callable_names
    assert use.must_call is must_call
    assert list(use.parameters) == callable_names


def test_tools_have_one_form_for_templates() -> None:
    use = tool_use(copy.deepcopy(TOOLS), "auto", None)

    assert use.template_tools == [
        WEATHER,
        {"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}},
    ]
    assert [tool.is_strict for tool in use.tools] == [True, False]
    assert use.tools[1].parameters == {"type": "object", "properties": {}}


def test_no_tools_are_no_tools() -> None:
    assert tool_use(None, "auto", None) == tool_use([], None, None) == ToolUse()


@pytest.mark.parametrize(("parallel", "max_calls"), [(None, None), (True, None), (False, 1)])
def test_calls_are_one_when_not_parallel(parallel: object, max_calls: int | None) -> None:
    assert tool_use(TOOLS, "auto", parallel).max_calls == max_calls


def test_tool_that_is_named_is_called_once() -> None:
    assert tool_use(TOOLS, {"type": "function", "name": "add"}, True).max_calls == 1


def changed(**function: object) -> list[object]:
    return [{"type": "function", "function": {"name": "f", **function}}]


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "field"),
    [
        ("x", None, None, "tools"),
        ([ADD] * (MAX_TOOLS + 1), None, None, "tools"),
        ([ADD, ADD], None, None, "tools[1]"),
        ([5], None, None, "tools[0].type"),
        ([{"type": "web_search"}], None, None, "tools[0].type"),
        ([{"type": "function", "function": 5}], None, None, "tools[0].function"),
        ([{"type": "function"}], None, None, "tools[0].name"),
        (changed(name="a b"), None, None, "tools[0].function.name"),
        (changed(name='a"'), None, None, "tools[0].function.name"),
        (changed(name="a\n"), None, None, "tools[0].function.name"),
        (changed(description=[]), None, None, "tools[0].function.description"),
        (changed(strict=1), None, None, "tools[0].function.strict"),
        (changed(parameters={"x-guidance": {}}), None, None, "tools[0].function.parameters"),
        (changed(parameters=[]), None, None, "tools[0].function.parameters"),
        (changed(parameters={"type": "array"}), None, None, "tools[0].function.parameters.type"),
        (changed(parameters={"a": "\ud800"}), None, None, "tools[0].function.parameters"),
        (changed(parameters={"a": "x" * 70_000}), None, None, "tools[0].function.parameters"),
        (TOOLS, "always", None, "tool_choice"),
        (TOOLS, 5, None, "tool_choice"),
        (TOOLS, {"type": "function", "name": "sub"}, None, "tool_choice.name"),
        (TOOLS, {"type": "function", "function": {}}, None, "tool_choice.name"),
        (TOOLS, {"type": "allowed_tools"}, None, "tool_choice.mode"),
        (TOOLS, {"type": "allowed_tools", "mode": "auto", "tools": []}, None, "tool_choice.tools"),
        (None, "required", None, "tool_choice"),
        ([], {"type": "function", "name": "add"}, None, "tool_choice"),
        (TOOLS, None, 1, "parallel_tool_calls"),
    ],
)
def test_tools_are_refused_by_the_field_when_they_make_no_sense(
    tools: object, choice: object, parallel: object, field: str
) -> None:
    with pytest.raises(GrammarRefused) as refused:
        tool_use(tools, choice, parallel)
    assert refused.value.field == field
