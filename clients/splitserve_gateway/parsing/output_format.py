"""Which notations a model uses, by the markers in its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve_gateway.config import ReasoningParserName, ToolCallParserName
from splitserve_gateway.parsing.formats import (
    FORMATS,
    HERMES,
    JSON,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    ToolCallFormat,
)
from splitserve_gateway.parsing.reasoning import (
    MISTRAL_THINK,
    REASONING_MARKS,
    THINK,
    ReasoningMarks,
)

# What a template says of calls, the most telling first.
_TOOL_CALL_MARKERS = (
    ("[ARGS]", MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", LLAMA3_JSON),
    ('"parameters": dictionary of argument name', LLAMA3_JSON),
)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes calls and reasoning; None where it does not, or nobody is to look."""

    tool_calls: ToolCallFormat | None
    reasoning: ReasoningMarks | None

    @classmethod
    def of(
        cls,
        chat_template: str,
        tool_call_parser: ToolCallParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
    ) -> OutputFormat:
        """By name; `auto` goes by the template, and is JSON where that says nothing of calls."""
        tool_calls = FORMATS.get(tool_call_parser)
        if tool_call_parser == "auto":
            tool_calls = _tool_calls_of(chat_template)
        elif tool_calls is MISTRAL and "[ARGS]" in chat_template:
            tool_calls = MISTRAL_ARGS
        reasoning = REASONING_MARKS.get(reasoning_parser)
        if reasoning_parser == "auto":
            reasoning = _reasoning_of(chat_template)
        return cls(tool_calls, reasoning)

    @property
    def marker_texts(self) -> frozenset[str]:
        """Texts that a parser has to see, even where they are special tokens of the model."""
        calls = self.tool_calls.markers if self.tool_calls else ()
        marks = (self.reasoning.opener, self.reasoning.closer) if self.reasoning else ()
        return frozenset([*calls, *marks])


def _tool_calls_of(template: str) -> ToolCallFormat:
    return next((found for text, found in _TOOL_CALL_MARKERS if text in template), JSON)


def _reasoning_of(template: str) -> ReasoningMarks | None:
    for marks in (MISTRAL_THINK, THINK):
        if marks.opener in template or marks.closer in template:
            return marks
    return None
