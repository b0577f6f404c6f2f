"""Tools of a request, and grammars for answers that call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

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
from splitserve_text import (
    Choices,
    Grammar,
    JsonSchema,
    Lark,
    ReasoningMarks,
    ReasoningState,
    Regex,
    ToolCallFormat,
)

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


# -- Grammars of tool calls, in the notations that models were trained on --------------------------

_MAX_CALLS = 32  # bounds the length of an answer


@dataclass(frozen=True, slots=True)
class _Spelling:
    """Texts around the name and the arguments of a call, in order."""

    name: tuple[str, ...]  # before the name
    arguments: tuple[str, ...]
    end: tuple[str, ...]
    between: str
    first: tuple[str, ...] = ()  # before all calls
    last: tuple[str, ...] = ()


_NAME = '{"name": "'
_ARGUMENTS = '", "arguments": '
_PARAMETERS = '", "parameters": '


def _in_list(opener: str, closer: str) -> _Spelling:
    """Returns the spelling of a list of JSON objects between two texts."""
    first, last = (opener, "["), ("]", *([closer] if closer else []))
    return _Spelling((_NAME,), (_ARGUMENTS,), ("}",), ", ", first, last)


_DEEPSEEK = _Spelling(
    ("<｜tool▁call▁begin｜>",),  # noqa: RUF001
    ("<｜tool▁sep｜>",),  # noqa: RUF001
    ("<｜tool▁call▁end｜>",),  # noqa: RUF001
    "",
    ("<｜tool▁calls▁begin｜>",),  # noqa: RUF001
    ("<｜tool▁calls▁end｜>",),  # noqa: RUF001
)
_SPELLINGS = {
    "hermes": _Spelling(
        ("<tool_call>", f"\n{_NAME}"), (_ARGUMENTS,), ("}\n", "</tool_call>"), "\n"
    ),
    "llama3_json": _Spelling((_NAME,), (_PARAMETERS,), ("}",), "; "),
    "llama4": _Spelling((_NAME,), (_PARAMETERS,), ("}",), "; "),
    "function_tag": _Spelling(("<function=",), (">",), ("</function>",), "\n"),
    "mistral": _in_list("[TOOL_CALLS]", ""),
    "mistral_args": _Spelling(("[TOOL_CALLS]",), ("[ARGS]",), (), ""),
    "deepseek": _DEEPSEEK,
    "deepseek_v3": replace(
        _DEEPSEEK,
        name=(*_DEEPSEEK.name, "function", *_DEEPSEEK.arguments),
        arguments=("\n```json\n",),
        end=("\n```", *_DEEPSEEK.end),
        between="\n",
    ),
    "kimi_k2": _Spelling(
        ("<|tool_call_begin|>", "functions."),
        (":0", "<|tool_call_argument_begin|>"),
        ("<|tool_call_end|>",),
        "",
        ("<|tool_calls_section_begin|>",),
        ("<|tool_calls_section_end|>",),
    ),
    "tool_calls_tag": _in_list("<tool_calls>", "</tool_calls>"),
    "nemotron": _in_list("<TOOLCALL>", "</TOOLCALL>"),
    "phi4_mini": _in_list("<|tool_call|>", "<|/tool_call|>"),
    "granite": _in_list("<|tool_call|>", ""),
    "lfm2": _in_list("<|tool_call_start|>", "<|tool_call_end|>"),
    "apertus": _Spelling(
        ('{"',), ('": ',), ("}",), ", ", ("<|tools_prefix|>", "["), ("]", "<|tools_suffix|>")
    ),
    "json": _Spelling((_NAME,), (_ARGUMENTS,), ("}",), ", ", ("[",), ("]",)),
}
# Texts that would also begin calls, in another spelling.
_OTHER_OPENERS = {"qwen3_coder": ("<function=",)}
# Models of these notations know calls in JSON as well.
_SPELLINGS["qwen3_coder"] = _SPELLINGS["hermes"]


def is_spelled(tool_call_format: ToolCallFormat) -> bool:
    """Returns whether a grammar can spell calls in a notation; otherwise they are JSON."""
    return tool_call_format.name in _SPELLINGS


def texts_of(tool_call_format: ToolCallFormat) -> frozenset[str]:
    """Returns the texts around names and arguments in a notation's grammars."""
    spelling = _SPELLINGS[tool_call_format.name]
    parts = (spelling.first, spelling.name, spelling.arguments, spelling.end, spelling.last)
    return frozenset(text for part in parts for text in part)


def only_calls(
    tools: Sequence[Tool],
    tool_call_format: ToolCallFormat,
    max_calls: int | None,
) -> Lark:
    """Returns a grammar for answers of 1 to 32 calls of `tools` and nothing else.

    `max_calls`: 1 allows a single call.
    """
    spelling = _SPELLINGS[tool_call_format.name]
    if max_calls == 1 and tool_call_format.name == "json":
        calls = "call"
    else:
        more = f"({_parts([spelling.between])} call){{0,{_MAX_CALLS - 1}}}"
        first, last = (_parts(part) for part in (spelling.first, spelling.last))
        calls = f"{first} call {'' if max_calls == 1 else more} {last}"
    return Lark(f"start: {calls}\n{_call_rules(tools, spelling)}")


def text_and_calls(tools: Sequence[Tool], tool_call_format: ToolCallFormat) -> Lark | None:
    """Returns a grammar for any text with calls of `tools` wherever the opener stands.

    Returns None for a notation in which not every call begins with the opener.
    """
    spelling = _SPELLINGS[tool_call_format.name]
    opener = spelling.name[0]
    if opener not in tool_call_format.openers:
        return None
    rest = replace(spelling, name=spelling.name[1:])
    others = _OTHER_OPENERS.get(tool_call_format.name, ())
    openers = "|".join(_regex(each) for each in (opener, *others))
    return Lark(
        f"start: (OPENED call)* FREE\nFREE: {ANY_TEXT} & ~/(.|\n)*({openers})(.|\n)*/\n"
        f"OPENED: FREE {quoted(opener)}\n{_call_rules(tools, rest)}"
    )


def _call_rules(tools: Sequence[Tool], spelling: _Spelling) -> str:
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    name, arguments, end = (
        _parts(part) for part in (spelling.name, spelling.arguments, spelling.end)
    )
    for index, tool in enumerate(tools):
        called = _parts([tool.name])
        rules += [
            f"call_{index}: {name} {called} {arguments} arguments_{index} {end}",
            f"arguments_{index}: {embedded(tool.schema)}",
        ]
    return "\n".join(rules) + "\n"


def _parts(texts: Sequence[str]) -> str:
    return " ".join(quoted(text) for text in texts if text)


def _regex(text: str) -> str:
    # Escapes no other characters: `\\<` would match the beginning of a word.
    return "".join(f"\\{char}" if char in "[]|/" else char for char in text)


# -- Composition of grammars, in llguidance's dialect of Lark --------------------------------------

ANY_TEXT = r"/(.|\n)*/"
_LITTLE_SPACE = '"x-guidance": {"whitespace_pattern": "[ ]?"}'
_SPACE = r"/[ \t\r\n]{0,8}/"


def quoted(text: str) -> str:
    """Returns `text` as a string literal of a rule."""
    return json.dumps(text, ensure_ascii=False)


def up_to(name: str, end: str) -> str:
    """Returns a rule `name` that matches any text up to and including the first `end`."""
    return f"{name}[suffix={quoted(end)}]: {ANY_TEXT}\n"


def embedded(grammar: Grammar) -> str:
    """Returns `grammar` as the right side of a rule."""
    match grammar:
        case JsonSchema(schema):
            return f"%json {_with_little_space(schema)}"
        case Regex(pattern):
            return f"/{_escaped(pattern)}/"
        case Choices(texts):
            return " | ".join(map(quoted, texts))
        case Lark(text):
            return f"%lark {{\n{text}\n}}"
    assert_never(grammar)


def as_sent(grammar: Grammar) -> Grammar:
    """Returns `grammar` as sent to schedulers.

    A JSON Schema allows at most one space between tokens.
    Otherwise a model that prefers white space may write nothing else until its tokens run out.
    """
    if isinstance(grammar, JsonSchema):
        return Lark(f"start: {embedded(grammar)}\n")
    return grammar


def either(first: Grammar, second: Grammar) -> Lark:
    """Returns a grammar for answers that match `first` or `second`."""
    return Lark(f"start: first | second\nfirst: {embedded(first)}\nsecond: {embedded(second)}\n")


def after_reasoning(grammar: Grammar, marks: ReasoningMarks, state: ReasoningState) -> Grammar:
    """Returns `grammar` with the reasoning that precedes it.

    `state`: reasoning state of the prompt.
    If reasoning has not begun, it is optional.
    """
    if state is ReasoningState.CLOSED:
        return grammar
    reasoned = "reasoned" if state is ReasoningState.OPEN else "(opener reasoned)?"
    return Lark(
        f"start: {reasoned} answer\n"
        f"opener: {quoted(marks.opener)}\n"
        f"reasoned: thoughts {_SPACE}\n"
        f"{up_to('thoughts', marks.closer)}"
        f"answer: {embedded(grammar)}\n"
    )


def _with_little_space(schema: str) -> str:
    """Adds the white space option to JSON text `schema`, which has no compiler options yet."""
    members = schema.strip().removeprefix("{").removesuffix("}").strip()
    if not schema.lstrip().startswith("{") or not members:
        members = ""  # boolean schema
    return "{" + _LITTLE_SPACE + (f", {members}" if members else "") + "}"


def _escaped(pattern: str) -> str:
    """Escapes a regex for use between slashes on one line."""
    return re.sub(r"\\[\s\S]|[/\n\r]", _escape_one, pattern)


def _escape_one(match: re.Match[str]) -> str:
    found = match.group()
    by_name = {"\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r", "/": r"\/"}
    return by_name.get(found, found)
