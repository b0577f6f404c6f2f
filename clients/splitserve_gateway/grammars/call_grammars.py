"""Grammars of tool calls, in the notations that models were trained on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from splitserve_gateway.grammars.call_values import (
    PYTHON_LITERALS,
    LiteralSpelling,
    NotSpelled,
    Rules,
    TagSpelling,
    gemma_literals,
)
from splitserve_gateway.grammars.lark import (
    MAYBE_LINE,
    embedded,
    quoted,
    texts_in_order,
    without,
)
from splitserve_gateway.grammars.tools import Tool
from splitserve_text import Lark, ToolCallFormat

_MAX_CALLS = 32  # bounds the length of an answer


@dataclass(frozen=True, slots=True)
class _Spelling:
    """Texts around the name and the arguments of a call, in order.

    `values`: notation of the arguments; None for JSON.
    """

    name: tuple[str, ...]  # before the name
    arguments: tuple[str, ...]
    end: tuple[str, ...]
    between: str
    first: tuple[str, ...] = ()  # before all calls
    last: tuple[str, ...] = ()
    values: TagSpelling | LiteralSpelling | None = None

    @property
    def texts(self) -> frozenset[str]:
        parts = (self.first, self.name, self.arguments, self.end, self.last)
        own = frozenset(text for part in parts for text in part)
        return own if self.values is None else own.union(self.values.texts)


_NAME = '{"name": "'
_ARGUMENTS = '", "arguments": '
_PARAMETERS = '", "parameters": '


def _in_list(opener: str, closer: str) -> _Spelling:
    """Returns the spelling of a list of JSON objects between two texts."""
    first, last = (opener, "["), ("]", *([closer] if closer else []))
    return _Spelling((_NAME,), (_ARGUMENTS,), ("}",), ", ", first, last)


def _in_python(first: tuple[str, ...], last: tuple[str, ...], between: str = ", ") -> _Spelling:
    return _Spelling((), ("(",), (")",), between, first, last, PYTHON_LITERALS)


_DEEPSEEK = _Spelling(
    ("<｜tool▁call▁begin｜>",),  # noqa: RUF001
    ("<｜tool▁sep｜>",),  # noqa: RUF001
    ("<｜tool▁call▁end｜>",),  # noqa: RUF001
    "",
    ("<｜tool▁calls▁begin｜>",),  # noqa: RUF001
    ("<｜tool▁calls▁end｜>",),  # noqa: RUF001
)
_LLAMA_JSON = _Spelling((_NAME,), (_PARAMETERS,), ("}",), "; ")
_FUNCTION_TAGS = TagSpelling("<parameter=", (">",), "</parameter>", ("\n",))
_INVOKE_TAGS = TagSpelling('<parameter name="', ('">',), "</parameter>", ("\n",))
_DSML_TAGS = TagSpelling(
    '<｜DSML｜parameter name="',  # noqa: RUF001
    ('" string="{}">',),
    "</｜DSML｜parameter>",  # noqa: RUF001
    ("\n",),
    is_marked=True,
)
_KEYS_AND_VALUES = TagSpelling(
    "<arg_key>",
    ("</arg_key>", MAYBE_LINE, "<arg_value>"),
    "</arg_value>",
    (MAYBE_LINE,),
    or_json=False,
)
# Spellings by notation, the usual one first.
_SPELLINGS: dict[str, tuple[_Spelling, ...]] = {
    "hermes": (
        _Spelling(("<tool_call>", f"\n{_NAME}"), (_ARGUMENTS,), ("}\n", "</tool_call>"), "\n"),
    ),
    "qwen3_coder": (
        _Spelling(
            ("<tool_call>", "\n<function="),
            (">\n",),
            ("</function>\n", "</tool_call>"),
            "\n",
            values=replace(_FUNCTION_TAGS, line="\n"),
        ),
    ),
    "llama3_json": (_LLAMA_JSON, _in_python(("[",), ("]",))),
    "llama4": (_LLAMA_JSON, _in_python(("[",), ("]",))),
    "function_tag": (_Spelling(("<function=",), (">",), ("</function>",), "\n"),),
    "mistral": (_in_list("[TOOL_CALLS]", ""),),
    "mistral_args": (_Spelling(("[TOOL_CALLS]",), ("[ARGS]",), (), ""),),
    "deepseek": (_DEEPSEEK,),
    "deepseek_v3": (
        replace(
            _DEEPSEEK,
            name=(*_DEEPSEEK.name, "function", *_DEEPSEEK.arguments),
            arguments=("\n```json\n",),
            end=("\n```", *_DEEPSEEK.end),
            between="\n",
        ),
    ),
    "deepseek_dsml": (
        _Spelling(
            ('<｜DSML｜invoke name="',),  # noqa: RUF001
            ('">\n',),
            ("</｜DSML｜invoke>\n",),  # noqa: RUF001
            "",
            ("<｜DSML｜function_calls>", "\n"),  # noqa: RUF001
            ("</｜DSML｜function_calls>",),  # noqa: RUF001
            _DSML_TAGS,
        ),
    ),
    "kimi_k2": (
        _Spelling(
            ("<|tool_call_begin|>", "functions."),
            (":0", "<|tool_call_argument_begin|>"),
            ("<|tool_call_end|>",),
            "",
            ("<|tool_calls_section_begin|>",),
            ("<|tool_calls_section_end|>",),
        ),
    ),
    "glm": (
        _Spelling(
            ("<tool_call>",),
            (MAYBE_LINE,),
            ("</tool_call>",),
            MAYBE_LINE,
            values=_KEYS_AND_VALUES,
        ),
    ),
    "hunyuan": (
        _Spelling(
            ("<tool_call>",),
            ("<tool_sep>", "\n"),
            ("</tool_call>",),
            "\n",
            ("<tool_calls>", "\n"),
            ("\n", "</tool_calls>"),
            _KEYS_AND_VALUES,
        ),
    ),
    "minimax": (
        _Spelling(
            ('<invoke name="',),
            ('">\n',),
            ("</invoke>\n",),
            "",
            ("<minimax:tool_call>", "\n"),
            ("</minimax:tool_call>",),
            _INVOKE_TAGS,
        ),
    ),
    "seed_oss": (
        _Spelling(
            ("<seed:tool_call>", "\n<function="),
            (">\n",),
            ("</function>\n", "</seed:tool_call>"),
            "\n",
            values=_FUNCTION_TAGS,
        ),
    ),
    "gemma3": (_in_python(("```tool_code\n",), ("\n```",), "\n"),),
    "gemma4": (
        _Spelling(
            ("<|tool_call>", "call:"),
            ("{",),
            ("}", "<tool_call|>"),
            "",
            values=gemma_literals('<|"|>'),
        ),
    ),
    "functiongemma": (
        _Spelling(
            ("<start_function_call>", "call:"),
            ("{",),
            ("}", "<end_function_call>"),
            "",
            values=gemma_literals("<escape>"),
        ),
    ),
    "tool_calls_tag": (_in_list("<tool_calls>", "</tool_calls>"),),
    "nemotron": (_in_list("<TOOLCALL>", "</TOOLCALL>"),),
    "phi4_mini": (_in_list("<|tool_call|>", "<|/tool_call|>"),),
    "granite": (_in_list("<|tool_call|>", ""),),
    "lfm2": (
        _in_python(("<|tool_call_start|>", "["), ("]", "<|tool_call_end|>")),
        _in_list("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "olmo3": (_in_python(("<function_calls>",), ("</function_calls>",), "\n"),),
    "apertus": (
        _Spelling(
            ('{"',), ('": ',), ("}",), ", ", ("<|tools_prefix|>", "["), ("]", "<|tools_suffix|>")
        ),
    ),
    "json": (_Spelling((_NAME,), (_ARGUMENTS,), ("}",), ", ", ("[",), ("]",)),),
}
# Openers of calls that the grammar of a notation never writes.
_OTHER_OPENERS = {"qwen3_coder": ("<function=",)}


def is_spelled(tool_call_format: ToolCallFormat) -> bool:
    """Returns whether a grammar can spell calls in a notation; otherwise they are JSON."""
    return tool_call_format.name in _SPELLINGS


def texts_of(tool_call_format: ToolCallFormat) -> frozenset[str]:
    """Returns the texts around names and arguments in a notation's grammars."""
    return frozenset[str]().union(*(each.texts for each in _SPELLINGS[tool_call_format.name]))


def only_calls(
    tools: Sequence[Tool],
    tool_call_format: ToolCallFormat,
    max_calls: int | None,
) -> Lark | None:
    """Returns a grammar for answers of 1 to 32 calls of `tools` and nothing else.

    `max_calls`: 1 allows a single call. Returns None if the notation has no way to write values of
    a tool's schema.
    """
    rules, options = Rules(), []
    for spelling in _SPELLINGS[tool_call_format.name]:
        with suppress(NotSpelled):
            call = _call(tools, spelling, rules)
            if max_calls == 1 and tool_call_format.name == "json":
                options.append(call)
            else:
                options.append(_calls(call, spelling, 1 if max_calls == 1 else _MAX_CALLS))
    return Lark(f"start: {' | '.join(options)}\n{rules.text()}") if options else None


def text_and_calls(tools: Sequence[Tool], tool_call_format: ToolCallFormat) -> Lark | None:
    """Returns a grammar for any text with calls of `tools` wherever the opener stands.

    Returns None for a notation in which not every call begins with the opener, or that has no way
    to write values of a tool's schema.
    """
    if tool_call_format.may_be_bare:
        return None
    rules, openers, options = Rules(), set[str](), []
    for spelling in _SPELLINGS[tool_call_format.name]:
        with suppress(NotSpelled):
            opener, *rest = (*spelling.name, "")
            if opener in tool_call_format.openers:
                options.append(_call(tools, replace(spelling, name=tuple(rest)), rules))
                openers |= {opener, *_OTHER_OPENERS.get(tool_call_format.name, ())}
            else:
                opener, *rest = spelling.first
                call = _call(tools, spelling, rules)
                options.append(_calls(call, replace(spelling, first=tuple(rest)), _MAX_CALLS))
                openers |= set(tool_call_format.openers)
    if not options:
        return None
    return Lark(
        f"start: (OPENED ({' | '.join(options)}))* FREE\nFREE: {without(*sorted(openers))}\n"
        f"OPENED: FREE {quoted(opener)}\n{rules.text()}"
    )


def _calls(call: str, spelling: _Spelling, most: int) -> str:
    first, last = texts_in_order(spelling.first), texts_in_order(spelling.last)
    more = f"({texts_in_order([spelling.between])} {call}){{0,{most - 1}}}" if most > 1 else ""
    return f"{first} {call} {more} {last}"


def _call(tools: Sequence[Tool], spelling: _Spelling, rules: Rules) -> str:
    """Returns the name of a rule for a call of one of `tools`. Raises NotSpelled."""
    name, between, end = map(texts_in_order, (spelling.name, spelling.arguments, spelling.end))
    calls = []
    for tool in tools:
        if spelling.values is None:
            arguments = rules.rule(embedded(tool.schema))
        else:
            try:
                arguments = spelling.values.arguments(tool.schema, rules)
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
                raise NotSpelled from error  # no schema, as the compiler will say
        calls.append(
            rules.rule(f"{name} {texts_in_order([tool.name])} {between} {arguments} {end}")
        )
    return rules.rule(" | ".join(calls))
