"""Notations that a model describes itself: `response_template` in `tokenizer_config.json`.

Source: documentation of transformers 5.13, "Response Parsing". Only regions between fixed texts
are understood: calls in JSON or as in Python, and reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping

from splitserve_text.call_formats import ToolCallFormat
from splitserve_text.reasoning import ReasoningMarks
from splitserve_text.tool_calls import CallBody, JsonBody, PythonBody

_NAME = "response_template"
_CALLS = ("tool_calls",)
_REASONING = ("thinking", "reasoning_content", "reasoning")
_BODIES: Mapping[str, CallBody] = {"json": JsonBody(), "python-call-list": PythonBody()}


def described_calls(template: object) -> ToolCallFormat | None:
    """Returns the notation of calls that a `response_template` describes.

    Returns None without one, and for a notation that cannot be read here.
    """
    field = _field(template, _CALLS)
    openers = _texts(field.get("open"))
    body = _BODIES.get(str(field.get("content")))
    if not openers or body is None or field.get("content_args"):
        return None
    return ToolCallFormat(_NAME, openers, body, _texts(field.get("close")), separators=",")


def described_reasoning(template: object) -> ReasoningMarks | None:
    """Returns the marks of reasoning that a `response_template` describes; None without them."""
    field = _field(template, _REASONING)
    openers, closers = _texts(field.get("open")), _texts(field.get("close"))
    return ReasoningMarks(_NAME, openers, closers) if openers and closers else None


def _field(template: object, names: tuple[str, ...]) -> Mapping[str, object]:
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if isinstance(fields, Mapping):
        for name in names:
            if isinstance(field := fields.get(name), Mapping):
                return field
    return {}


def _texts(value: object) -> tuple[str, ...]:
    """Returns texts to search for; none of them is the beginning of another."""
    listed = value if isinstance(value, list) else [value]
    texts = [text for text in listed if isinstance(text, str) and text.strip()]
    return tuple(
        text
        for text in texts
        if not any(text.startswith(other) for other in texts if other != text)
    )
