"""Grammars for answers that call tools, each in the notation that the model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitserve_client.types import Lark
from splitserve_gateway.grammars.lark import ANY_TEXT, embedded, quoted, up_to
from splitserve_gateway.grammars.tools import Tool
from splitserve_gateway.parsing.formats import ToolCallFormat

_MAX_CALLS = 32  # so that an answer ends


@dataclass(frozen=True, slots=True)
class _Spelling:
    """The texts around names and arguments of calls, in order."""

    name: tuple[str, ...]  # before the name
    arguments: tuple[str, ...]
    end: tuple[str, ...]
    between: str
    first: tuple[str, ...] = ()  # before all calls
    last: tuple[str, ...] = ()


_SPELLINGS = {
    "hermes": _Spelling(
        ("<tool_call>", '\n{"name": "'), ('", "arguments": ',), ("}\n", "</tool_call>"), "\n"
    ),
    "llama3_json": _Spelling(('{"name": "',), ('", "parameters": ',), ("}",), "; "),
    "mistral": _Spelling(
        ('{"name": "',), ('", "arguments": ',), ("}",), ", ", ("[TOOL_CALLS]", "["), ("]",)
    ),
    "mistral_args": _Spelling(("[TOOL_CALLS]",), ("[ARGS]",), (), ""),
    "json": _Spelling(('{"name": "',), ('", "arguments": ',), ("}",), ", ", ("[",), ("]",)),
}


def texts_of(tool_call_format: ToolCallFormat) -> frozenset[str]:
    """The texts that grammars for a notation have around names and arguments."""
    spelling = _SPELLINGS[tool_call_format.name]
    parts = (spelling.first, spelling.name, spelling.arguments, spelling.end, spelling.last)
    return frozenset(text for part in parts for text in part)


def only_calls(
    tools: Sequence[Tool],
    tool_call_format: ToolCallFormat,
    max_calls: int | None,
) -> Lark:
    """An answer that is a call, or up to 32, of `tools`, and nothing else."""
    spelling = _SPELLINGS[tool_call_format.name]
    if max_calls == 1 and tool_call_format.name == "json":
        calls = "call"
    else:
        more = f"({_parts([spelling.between])} call){{0,{_MAX_CALLS - 1}}}"
        first, last = (_parts(part) for part in (spelling.first, spelling.last))
        calls = f"{first} call {'' if max_calls == 1 else more} {last}"
    return Lark(f"start: {calls}\n{_call_rules(tools, spelling)}")


def text_and_calls(tools: Sequence[Tool], tool_call_format: ToolCallFormat) -> Lark | None:
    """An answer that is any text, with calls of `tools` wherever the opener stands in it.

    None for a notation in which not every call begins with the opener.
    """
    opener = tool_call_format.opener
    spelling = _SPELLINGS[tool_call_format.name]
    if spelling.name[0] != opener:
        return None
    rest = replace(spelling, name=spelling.name[1:])
    tail = ANY_TEXT + rf" & ~/(.|\n)*{_regex(opener)}(.|\n)*/"
    return Lark(
        f"start: (opened call)* TAIL\nTAIL: {tail}\n{up_to('opened', opener)}"
        f"{_call_rules(tools, rest)}"
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
    # `\\<` would be the beginning of a word.
    return "".join(f"\\{char}" if char in "[]|/" else char for char in text)
