"""The tools of a request, and whether the model may, or has to, call them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from splitserve_client.types import JsonSchema
from splitserve_gateway.grammars.requested import GrammarRefused, json_text
from splitserve_gateway.schemas.chat import MAX_TOOLS

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    `form`: as chat templates take it. `field`: where its schema stands in the request.
    """

    name: str
    form: Mapping[str, object]
    parameters: Mapping[str, object]
    schema: JsonSchema
    is_strict: bool
    field: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools a model is shown (`tools`), may call (`callable_tools`), and has to.

    `max_calls`: how many calls an answer may have; None for any number.
    """

    tools: tuple[Tool, ...] = ()
    callable_tools: tuple[Tool, ...] = ()
    must_call: bool = False
    max_calls: int | None = None

    @property
    def template_tools(self) -> list[Mapping[str, object]] | None:
        """What the chat template gets; None for a request without tools."""
        return [tool.form for tool in self.tools] or None

    @property
    def parameters(self) -> dict[str, Mapping[str, object]]:
        """What the parser gets: schemas by the names of tools."""
        return {tool.name: tool.parameters for tool in self.callable_tools}


def tool_use(tools: object, tool_choice: object, parallel_tool_calls: object) -> ToolUse:
    """From the fields of a Chat or a Responses request, parsed JSON of any shape.

    With `"none"` the model is not shown the tools; one that is named is called once. Raises
    GrammarRefused, also for other tools than functions.
    """
    if not isinstance(parallel_tool_calls, bool | None):
        raise GrammarRefused("parallel_tool_calls", "must be true or false")
    known = _tools(tools)
    if tool_choice is None or tool_choice == "auto":
        chosen, must_call = known, False
    elif tool_choice == "none":
        return ToolUse()
    elif not known:
        raise GrammarRefused("tool_choice", "needs tools")
    elif tool_choice == "required":
        chosen, must_call = known, True
    else:
        chosen, must_call = _chosen(known, tool_choice)
    is_named = isinstance(tool_choice, dict) and tool_choice["type"] == "function"
    is_one = is_named or parallel_tool_calls is False
    return ToolUse(known, chosen, must_call, 1 if is_one else None)


def _tools(value: object) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise GrammarRefused("tools", f"must be a list of at most {MAX_TOOLS} tools")
    tools = tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(value))
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise GrammarRefused(f"tools[{index}]", f"is the second one named {tool.name}")
        names.add(tool.name)
    return tools


def _tool(field: str, value: object) -> Tool:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise GrammarRefused(f"{field}.type", 'must be "function"; there are no built-in tools')
    if "function" in value:  # Chat
        field = f"{field}.function"
        function = value["function"]
    else:  # Responses
        function = {key: item for key, item in value.items() if key != "type"}
    if not isinstance(function, dict):
        raise GrammarRefused(field, "must be an object")
    name = _checked_name(f"{field}.name", function.get("name"))
    if not isinstance(function.get("description"), str | None):
        raise GrammarRefused(f"{field}.description", "must be a text")
    if not isinstance(function.get("strict"), bool | None):
        raise GrammarRefused(f"{field}.strict", "must be true or false")
    parameters = _parameters(f"{field}.parameters", function.get("parameters"))
    return Tool(
        name=name,
        form={"type": "function", "function": function},
        parameters=parameters,
        schema=JsonSchema(json_text(f"{field}.parameters", parameters)),
        is_strict=function.get("strict") is True,
        field=f"{field}.parameters",
    )


def _checked_name(field: str, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise GrammarRefused(field, "must be 1 to 128 letters, digits, '_', '-' or '.'")
    return name


def _parameters(field: str, value: object) -> Mapping[str, object]:
    """Arguments are an object, whether the schema says it or not."""
    if value is None:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict):
        raise GrammarRefused(field, "must be an object")
    if "x-guidance" in value:
        raise GrammarRefused(field, "has x-guidance, which is not supported")
    if value.get("type") is None:
        return {"type": "object", **{key: v for key, v in value.items() if key != "type"}}
    if value["type"] != "object":
        raise GrammarRefused(f"{field}.type", 'must be "object"')
    return value


def _chosen(known: tuple[Tool, ...], choice: object) -> tuple[tuple[Tool, ...], bool]:
    """Of a choice that names tools: which, and whether one has to be called."""
    field = "tool_choice"
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "allowed_tools"):
        raise GrammarRefused(field, 'must be "none", "auto", "required" or name a function')
    if choice["type"] == "function":
        return (_named(known, field, choice),), True
    allowed = choice.get("allowed_tools", choice)  # Chat has it one level down
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise GrammarRefused(f"{field}.mode", 'must be "auto" or "required"')
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_TOOLS:
        raise GrammarRefused(f"{field}.tools", f"must be 1 to {MAX_TOOLS} tools")
    names = {
        _named(known, f"{field}.tools[{index}]", each).name for index, each in enumerate(listed)
    }
    return tuple(tool for tool in known if tool.name in names), allowed["mode"] == "required"


def _named(known: tuple[Tool, ...], field: str, choice: object) -> Tool:
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for tool in known:
        if tool.name == name:
            return tool
    raise GrammarRefused(f"{field}.name", "names no function of tools")
