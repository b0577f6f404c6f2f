"""Tools and tool choices of chats."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve_gateway.grammars import GrammarRefused, ToolUse
from tests.unit.gateway.grammars.answer_rules import allowed, use_of

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {}}},
}
TOOLS = [WEATHER, ADD]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "shown", "callable_names", "must_call"),
    [
        (None, 2, ["get_weather", "add"], False),
        ("auto", 2, ["get_weather", "add"], False),
        ("none", 0, [], False),
        ("required", 2, ["get_weather", "add"], True),
        (named("add"), 2, ["add"], True),
        (allowed("auto", "add", "add"), 2, ["add"], False),
        (allowed("required", "add"), 2, ["add"], True),
        (allowed("required", "add", "get_weather"), 2, ["get_weather", "add"], True),
    ],
)
def test_choice_says_what_may_be_called(
    choice: object, shown: int, callable_names: list[str], must_call: bool
) -> None:
    use = use_of(TOOLS, choice)

    assert len(use.template_tools or []) == shown
    assert [tool.name for tool in use.callable_tools] == callable_names
    assert use.must_call is must_call
    assert list(use.parameters) == callable_names
    assert use.barred == ({"get_weather", "add"} - set(callable_names) if shown else set())


def test_template_gets_tools_in_one_order() -> None:
    function = {"strict": None, "parameters": {"a": None}, "description": None, "name": "f"}
    use = use_of([WEATHER, {"function": function, "type": "function"}])

    form = {"type": "function", "function": {"name": "f", "parameters": {"a": None}}}
    assert use.template_tools == [WEATHER, form]
    assert list((use.template_tools or [])[1]["function"]) == ["name", "parameters"]  # type: ignore[call-overload]
    assert [tool.is_strict for tool in use.tools] == [True, False]
    assert use.tools[1].parameters == {"type": "object", "a": None}


def test_no_tools_are_no_tools() -> None:
    assert use_of(None, "auto") == use_of([]) == ToolUse()


@pytest.mark.parametrize(("parallel", "max_calls"), [(None, None), (True, None), (False, 1)])
def test_calls_are_one_when_not_parallel(parallel: bool | None, max_calls: int | None) -> None:
    assert use_of(TOOLS, "auto", parallel).max_calls == max_calls
    assert use_of(TOOLS, "required", parallel).max_calls == max_calls
    assert use_of(TOOLS, allowed("auto", "add"), parallel).max_calls == max_calls


def test_tool_that_is_named_is_called_once() -> None:
    assert use_of(TOOLS, named("add"), parallel=True).max_calls == 1


def with_parameters(parameters: object) -> list[object]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([ADD, ADD], None, "tools.1.function.name"),
        (with_parameters({"x-guidance": {}}), None, "tools.0.function.parameters"),
        (with_parameters({"type": "array"}), None, "tools.0.function.parameters.type"),
        (with_parameters({"a": "\ud800"}), None, "tools.0.function.parameters"),
        (with_parameters({"a": "x" * 70_000}), None, "tools.0.function.parameters"),
        (TOOLS, named("sub"), "tool_choice.function.name"),
        (
            TOOLS,
            allowed("auto", "add", "sub"),
            "tool_choice.allowed_tools.tools.1.function.name",
        ),
        (None, "required", "tool_choice"),
        ([], named("add"), "tool_choice"),
    ],
)
def test_tools_are_refused_by_their_field(tools: object, choice: object, field: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        use_of(tools, choice)
    assert refused.value.field == field
