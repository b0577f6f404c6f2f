"""Tools of a request, and how it may call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitserve_gateway.grammars.checker import GrammarRefused, compilable_schema, json_text
from splitserve_gateway.schemas import (
    AllowedChatChoice,
    ChatTool,
    ChatToolChoice,
    ChatToolName,
    FunctionDefinition,
    ignored_names,
)
from splitserve_grammars.llguidance_text import OPTIONS_KEY
from splitserve_text import JsonSchema

_NOT_SHOWN = ignored_names(FunctionDefinition)


@dataclass(frozen=True, slots=True)
class Tool:
    """Function that the model may call.

    `form`: the tool in the form of chat templates. `field`: path of its schema in the request.
    `loose_schema`: as in RequestedGrammar.
    """

    name: str
    form: Mapping[str, object]
    parameters: Mapping[str, object]
    schema: JsonSchema
    is_strict: bool
    field: str
    loose_schema: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools shown to the model (`tools`), those it may call (`callable_tools`), and required calls.

    `must_call`: the answer has to be a call. `max_calls`: calls per answer; None for any number.
    """

    tools: tuple[Tool, ...] = ()
    callable_tools: tuple[Tool, ...] = ()
    must_call: bool = False
    max_calls: int | None = None

    @property
    def template_tools(self) -> list[Mapping[str, object]] | None:
        """Tools in the form of chat templates; None for a request without tools."""
        return [tool.form for tool in self.tools] or None

    @property
    def parameters(self) -> dict[str, Mapping[str, object]]:
        """Parameter schemas by tool name, for the parser."""
        return {tool.name: tool.parameters for tool in self.callable_tools}

    @property
    def barred(self) -> frozenset[str]:
        """Names of tools that the model sees but may not call."""
        return frozenset(tool.name for tool in self.tools) - self.parameters.keys()


def tool_use(
    tools: Sequence[ChatTool] | None, choice: ChatToolChoice | None, *, is_parallel: bool = True
) -> ToolUse:
    """Returns the tool use that `tools` and `tool_choice` of a chat ask for.

    With `"none"` the model sees no tools. A named tool is called once. With allowed tools the model
    still sees all tools. Raises GrammarRefused.
    """
    known = _tools(tools or ())
    max_calls = None if is_parallel else 1
    if choice is None or choice == "auto":
        return ToolUse(known, known, must_call=False, max_calls=max_calls)
    if choice == "none":
        return ToolUse()
    if not known:
        message = "is only allowed when tools are specified; without tools: none, auto or null"
        raise GrammarRefused("tool_choice", message)
    match choice:
        case ChatToolName(function=function):
            named = _named(known, "tool_choice.function.name", function.name)
            return ToolUse(known, (named,), must_call=True, max_calls=1)
        case AllowedChatChoice(allowed_tools=allowed):
            names = {
                _named(known, f"tool_choice.allowed_tools.tools.{index}.function.name", name).name
                for index, name in enumerate(each.function.name for each in allowed.tools)
            }
            chosen = tuple(tool for tool in known if tool.name in names)
            return ToolUse(known, chosen, allowed.mode == "required", max_calls)
    return ToolUse(known, known, must_call=True, max_calls=max_calls)


def _tools(listed: Sequence[ChatTool]) -> tuple[Tool, ...]:
    tools = tuple(_tool(f"tools.{i}.function", tool.function) for i, tool in enumerate(listed))
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            message = f"is {tool.name}, as of another function"
            raise GrammarRefused(f"tools.{index}.function.name", message)
        names.add(tool.name)
    return tools


def _tool(field: str, function: FunctionDefinition) -> Tool:
    field = f"{field}.parameters"
    parameters = _parameters(field, function.parameters)
    schema = compilable_schema(field, parameters)
    names = (name for name in FunctionDefinition.model_fields if name not in _NOT_SHOWN)
    fields = {name: getattr(function, name) for name in names}
    form = {name: value for name, value in fields.items() if value is not None}
    return Tool(
        name=function.name,
        form={"type": "function", "function": form},
        parameters=parameters,
        schema=JsonSchema(json_text(field, schema)),
        loose_schema=None if function.strict else schema,
        is_strict=function.strict is True,
        field=field,
    )


def _parameters(field: str, value: Mapping[str, object] | None) -> Mapping[str, object]:
    """Returns the schema of a function's parameters. Adds the type `object` if it is missing."""
    if value is None:
        return {"type": "object", "properties": {}}
    if OPTIONS_KEY in value:
        raise GrammarRefused(field, f"has {OPTIONS_KEY}, which is not supported")
    if value.get("type") is None:
        return {"type": "object", **{key: v for key, v in value.items() if key != "type"}}
    if value["type"] != "object":
        raise GrammarRefused(f"{field}.type", 'must be "object"')
    return value


def _named(known: tuple[Tool, ...], field: str, name: str) -> Tool:
    for tool in known:
        if tool.name == name:
            return tool
    raise GrammarRefused(field, "is not the name of a function in tools")
