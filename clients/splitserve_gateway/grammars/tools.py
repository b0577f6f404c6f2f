"""The tools of a request, and whether the model may, or has to, call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitserve_client.types import JsonSchema
from splitserve_gateway.grammars.requested import GrammarRefused, json_text
from splitserve_gateway.schemas.tools import (
    AllowedChatChoice,
    ChatTool,
    ChatToolChoice,
    ChatToolName,
    FunctionDefinition,
)
from splitserve_grammars.lark_checks import OPTIONS_KEY


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

    @property
    def barred(self) -> frozenset[str]:
        """The names of tools that a model is shown and may not call."""
        return frozenset(tool.name for tool in self.tools) - self.parameters.keys()


def tool_use(
    tools: Sequence[ChatTool] | None, choice: ChatToolChoice | None, *, is_parallel: bool = True
) -> ToolUse:
    """From the fields of a chat.

    With `"none"` the model is not shown the tools; one that is named is called once; of allowed
    ones it is shown all. Raises GrammarRefused.
    """
    known = _tools(tools or ())
    max_calls = None if is_parallel else 1
    if choice is None or choice == "auto":
        return ToolUse(known, known, must_call=False, max_calls=max_calls)
    if choice == "none":
        return ToolUse()
    if not known:
        raise GrammarRefused("tool_choice", "needs tools")
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
            message = f"is the second one named {tool.name}"
            raise GrammarRefused(f"tools.{index}.function.name", message)
        names.add(tool.name)
    return tools


def _tool(field: str, function: FunctionDefinition) -> Tool:
    field = f"{field}.parameters"
    parameters = _parameters(field, function.parameters)
    given = {name: getattr(function, name) for name in FunctionDefinition.model_fields}
    form = {name: value for name, value in given.items() if value is not None}
    return Tool(
        name=function.name,
        form={"type": "function", "function": form},
        parameters=parameters,
        schema=JsonSchema(json_text(field, parameters)),
        is_strict=function.strict is True,
        field=field,
    )


def _parameters(field: str, value: Mapping[str, object] | None) -> Mapping[str, object]:
    """Arguments are an object, whether the schema says it or not."""
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
    raise GrammarRefused(field, "names no function of tools")
