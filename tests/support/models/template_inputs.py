"""Messages in the form that `transformers` has to be given for the chat templates of families."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ABSENT = "absent"
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Form:
    """Form of the messages where they are no input of the template as they came.

    Arguments are values, unless they are text. `null`, `empty`: contents beside calls in place of
    null (which transformers drops) and of "".
    """

    has_text_arguments: bool = False
    null: str | None = ABSENT
    empty: str | None = ""
    has_names: bool = False
    has_parts: bool = False


_FORMS = {
    "apertus": _Form(has_text_arguments=True),
    "deepseek_v3": _Form(has_text_arguments=True, null=None, empty=None),
    "deepseek_v31": _Form(has_text_arguments=True, null=None),
    "functionary": _Form(has_text_arguments=True),
    "functiongemma": _Form(has_names=True),
    "granite_20b": _Form(has_names=True),
    "minimax_m1": _Form(has_parts=True),
    "phi4_mini": _Form(null=""),
}


def inputs_of(template: str, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies `messages`, in OpenAI's form, into the form for the template of this name."""
    form = _FORMS.get(template, _Form())
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    return [_input_of(message, form, names) for message in messages]


def _input_of(message: Mapping[str, Any], form: _Form, names: Mapping[str, str]) -> Message:
    found = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if "tool_calls" in found:
        found["tool_calls"] = [_call_of(call, form) for call in message["tool_calls"]]
        content = form.null if content is None else form.empty if content == "" else content
    if form.has_parts and content not in (None, ABSENT):
        content = [{"type": "text", "text": content}]
    found["content"] = content
    if content == ABSENT:
        del found["content"]
    if form.has_names and message["role"] == "tool":
        found["name"] = names[message["tool_call_id"]]
    return found


def _call_of(call: Mapping[str, Any], form: _Form) -> Message:
    arguments = call["function"]["arguments"]
    if form.has_text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not form.has_text_arguments and isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}
