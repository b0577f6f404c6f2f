"""Parsed answers, joined as a client joins them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from splitserve_text import (
    FORMATS,
    REASONING_MARKS,
    ContentDelta,
    Delta,
    OutputFormat,
    OutputParser,
    ParserOptions,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)

TOOLS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "note": {"type": ["string", "null"]},
            "items": {"type": "array"},
        },
    },
}


@dataclass
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Fails if the delta cannot come now."""
        match delta:
            case ContentDelta(text):
                assert text
                self.content += text
            case ReasoningDelta(text):
                assert text
                self.reasoning += text
            case ToolCallStart(index, call_id, name):
                assert index == len(self.calls)
                self.calls.append((name, ""))
                self.ids.append(call_id)
            case ToolCallArguments(index, text):
                assert index == len(self.calls) - 1
                assert text
                name, arguments = self.calls[index]
                self.calls[index] = (name, arguments + text)


def make_parser(format_name: str, reasoning: str = "none", **options: Any) -> OutputParser:  # noqa: ANN401
    ids = map(str, itertools.count())
    defaults: dict[str, Any] = {"tools": TOOLS, "new_id": lambda: next(ids)}
    return OutputParser(
        OutputFormat(FORMATS.get(format_name), REASONING_MARKS.get(reasoning)),
        ParserOptions(**defaults | options),
    )


def answer(
    pieces: str | Sequence[str],
    format_name: str,
    reasoning: str = "none",
    **options: Any,  # noqa: ANN401
) -> Answer:
    parser = make_parser(format_name, reasoning, **options)
    joined = Answer()
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        for delta in parser.push(piece):
            joined.add(delta)
    for delta in parser.finish():
        joined.add(delta)
    return joined
