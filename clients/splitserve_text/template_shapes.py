"""Message shapes that a chat template renders correctly, found by trial.

The same message has several forms in use: an absent content is null, "" or a missing key; a text is
a string or a list of parts; arguments of a tool call are JSON text or values. A template may render
one form, drop another and print a third as "None".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from splitserve_common import parse_json
from splitserve_text.errors import ChatTemplateFailed

_TEXT, _NAME, _KEY, _VALUE = "probetext", "probename", "probekey", "probevalue"
_SENDER = "probesender"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
# Some templates require ids of this length.
_CALL_ID, _OTHER_ID = "123456789", "987654321"
_ROLES = frozenset({"system", "user", "assistant", "tool"})
# Output of a template that prints a value which it took for a text.
_ARTEFACTS = ("None", "null", "'text'", '"text"', f"'{_KEY}'", f'\\"{_KEY}')
_MISSING = 100
_FAILED = 10_000
_MAX_SHOWN_CHARS = 80


class _Content(Enum):
    """Forms of a message's content; the first three all mean that it is empty."""

    NULL = auto()
    EMPTY = auto()
    ABSENT = auto()
    TEXT = auto()
    PARTS = auto()


# transformers drops null keys, so null is first tried as absent.
_NOTHING = (_Content.ABSENT, _Content.NULL, _Content.EMPTY)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Properties of a message that determine its shape. `content`: the form that it arrived in."""

    role: str
    content: _Content
    has_calls: bool
    has_reasoning: bool
    has_tools: bool


@dataclass(frozen=True, slots=True)
class _Shape:
    """Shape in which a message is written.

    `is_split`: text and tool calls as two messages, for templates that render only one of both. The
    reasoning stays with the calls.
    """

    content: _Content
    parses_arguments: bool = True
    is_split: bool = False


class MessageShapes:
    """Converts messages to the shapes that one template renders correctly. Thread-safe.

    `render`: renders messages with the template, with or without tools; raises ChatTemplateFailed.
    """

    def __init__(
        self, render: Callable[[Sequence[dict[str, Any]], list[dict[str, Any]] | None], str]
    ) -> None:
        self._render = render
        self._chosen: dict[_Kind, _Shape] = {}
        self._needs_names: dict[bool, bool] = {}
        self._refuses_several: dict[bool, bool] = {}

    def fit(self, messages: Sequence[dict[str, Any]], *, has_tools: bool) -> list[dict[str, Any]]:
        """Copies `messages` into shapes for the template; `has_tools`: the chat has tools.

        Raises ChatTemplateFailed for a content that is no text.
        """
        fitted: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        if any(_num_calls(each) > 1 for each in messages) and self._needs_single(has_tools):
            messages = list(_one_by_one(messages))
        for message in messages:
            names |= _called_names(message)
            name = names.get(str(message.get("tool_call_id")))
            is_unnamed = message.get("role") == "tool" and message.get("name") is None
            if is_unnamed and name is not None and self._needs_name(has_tools):
                message = {**message, "name": name}
            fitted += self._fit(message, has_tools=has_tools)
        return fitted

    def _fit(self, message: Mapping[str, Any], *, has_tools: bool) -> list[dict[str, Any]]:
        # OpenAI's clients send null and empty lists for absent fields.
        message = {k: v for k, v in message.items() if v is not None or k == "content"}
        calls, role = message.get("tool_calls"), message.get("role")
        if calls == []:
            del message["tool_calls"]
        kind = _Kind(
            role if isinstance(role, str) and role in _ROLES else "user",
            _content_kind(message),
            has_calls=_num_calls(message) > 0,
            has_reasoning=message.get("reasoning_content") is not None,
            has_tools=has_tools,
        )
        return self._write(message, self._shape(kind), has_tools=has_tools)

    def _write(
        self, message: Mapping[str, Any], shape: _Shape, *, has_tools: bool
    ) -> list[dict[str, Any]]:
        if shape.is_split:
            text = {name: value for name, value in message.items() if name not in _CALL_FIELDS}
            call = {name: value for name, value in message.items() if name != "content"}
            return self.fit([text, {**call, "content": None}], has_tools=has_tools)
        shaped = dict(message)
        if shape.content is _Content.ABSENT:
            shaped.pop("content", None)
        elif shape.content is _Content.NULL:
            shaped["content"] = None
        elif shape.content is _Content.EMPTY:
            shaped["content"] = ""
        else:
            shaped["content"] = _content(message.get("content"), shape.content)
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            parses = shape.parses_arguments
            shaped["tool_calls"] = [_tool_call(call, parses=parses) for call in calls]
        return [shaped]

    # -- trials ------------------------------------------------------------------------------------

    def _shape(self, kind: _Kind) -> _Shape:
        """Returns the shape with the fewest faults; among equals, the first."""
        if kind not in self._chosen:
            best, fewest = None, 0
            for shape in _candidates(kind):
                num_faults = self._num_faults(kind, shape)
                if best is None or num_faults < fewest:
                    best, fewest = shape, num_faults
                if num_faults == 0:
                    break
            assert best is not None, "every kind has a candidate"
            self._chosen[kind] = best
        return self._chosen[kind]

    def _num_faults(self, kind: _Kind, shape: _Shape) -> int:
        """Renders a probe of `kind` in `shape` and returns its faults; 0 if nothing is missing."""
        message: dict[str, Any] = {"role": kind.role, "content": _TEXT}
        marks = [_TEXT] if kind.content in (_Content.TEXT, _Content.PARTS) else []
        if kind.role == "tool":
            message |= {"tool_call_id": _CALL_ID, "name": _NAME}
        if not marks:
            message["content"] = None
        if kind.has_reasoning:
            message |= dict.fromkeys(_REASONING_FIELDS, "?")
        if kind.has_calls:
            message["tool_calls"] = [_probe_call()]
            marks += [_NAME, _VALUE]
        probed = self._write(message, shape, has_tools=kind.has_tools)
        chat = self._chat_around(kind, probed)
        text = self._rendered(chat, kind.has_tools)
        if shape.is_split and text is not None:
            # The next turns show whether two messages are too many where roles have to alternate.
            turns = [{"role": "assistant", "content": "?"}, {"role": "user", "content": "?"}]
            chat += self.fit(turns, has_tools=kind.has_tools)
            text = text if self._rendered(chat, kind.has_tools) is not None else None
        if text is None:
            return _FAILED
        missing = sum(_is_missing(mark, text, has_tools=kind.has_tools) for mark in marks)
        return _MISSING * missing + sum(text.count(artefact) for artefact in _ARTEFACTS)

    def _chat_around(self, kind: _Kind, probed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns a chat with the messages `probed` in the usual place for `kind`."""
        if kind.role == "user":
            return probed
        (user,) = self.fit([{"role": "user", "content": "?"}], has_tools=kind.has_tools)
        if kind.role == "system":
            return [*probed, user]
        if kind.role == "tool":
            call = {"role": "assistant", "content": None, "tool_calls": [_probe_call("other")]}
            return [user, *self.fit([call], has_tools=kind.has_tools), *probed]
        if not kind.has_calls:
            return [user, *probed]
        result = {**user, "role": "tool", "tool_call_id": _CALL_ID, "name": "other"}
        return [user, *probed, result]

    def _needs_name(self, has_tools: bool) -> bool:
        """Returns whether the template prints the name of a result, and nothing in its place."""
        if has_tools not in self._needs_names:
            turns = [_QUESTION, _probe_turn(_probe_call()), _probe_result()]
            bare = self._rendered_turns(turns, has_tools)
            turns[-1] = {**turns[-1], "name": _SENDER}
            named = self._rendered_turns(turns, has_tools)
            self._needs_names[has_tools] = named is not None and (
                bare is None or (bare != named and bare == named.replace(_SENDER, ""))
            )
        return self._needs_names[has_tools]

    def _needs_single(self, has_tools: bool) -> bool:
        """Returns whether the template refuses several calls in a turn, and not in several."""
        if has_tools not in self._refuses_several:
            calls = (_probe_call(), {**_probe_call(), "id": _OTHER_ID})
            results = [_probe_result(call["id"]) | {"name": _NAME} for call in calls]
            together = [_QUESTION, _probe_turn(*calls), *results]
            self._refuses_several[has_tools] = (
                self._rendered_turns(together, has_tools) is None
                and self._rendered_turns(list(_one_by_one(together)), has_tools) is not None
            )
        return self._refuses_several[has_tools]

    def _rendered_turns(self, turns: Sequence[dict[str, Any]], has_tools: bool) -> str | None:
        """Returns `turns` as the template renders each of them best; None if that fails."""
        chat = [shaped for turn in turns for shaped in self._fit(turn, has_tools=has_tools)]
        return self._rendered(chat, has_tools)

    def _rendered(self, chat: Sequence[dict[str, Any]], has_tools: bool) -> str | None:
        """Returns `chat` as the template renders it; None if that fails."""
        try:
            return self._render(chat, [_TOOL] if has_tools else None)
        except ChatTemplateFailed:
            return None


_QUESTION = {"role": "user", "content": "?"}
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Fields that only the calls keep when a message is split.
_CALL_FIELDS = frozenset({"tool_calls", *_REASONING_FIELDS})


def _candidates(kind: _Kind) -> Iterator[_Shape]:
    """Yields the shapes that a message of `kind` may have, the most usual first."""
    has_text = kind.content in (_Content.TEXT, _Content.PARTS)
    empty = (kind.content,) if kind.content is _Content.EMPTY else ()
    nothing = (*empty, *_NOTHING, _Content.PARTS)
    if has_text:
        contents: tuple[_Content, ...] = (kind.content, _Content.TEXT, _Content.PARTS)
    else:
        # Without calls the message has no other content, and every template accepts a text.
        contents = nothing if kind.has_calls else (_Content.EMPTY, _Content.PARTS)
    contents = tuple(dict.fromkeys(contents))
    if not kind.has_calls:
        yield from (_Shape(content) for content in contents)
        return
    yield from (_Shape(content, parses) for content in contents for parses in (True, False))
    if has_text:
        yield _Shape(kind.content, is_split=True)
        # Losing the text of a message is better than losing its tool call.
        yield from (_Shape(content, parses) for content in _NOTHING for parses in (True, False))


def _num_calls(message: Mapping[str, Any]) -> int:
    calls = message.get("tool_calls")
    return len(calls) if isinstance(calls, list) else 0


def _called_names(message: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of called tools by call id."""
    found: dict[str, str] = {}
    for call in message["tool_calls"] if _num_calls(message) else ():
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and call.get("id") is not None:
            found[str(call["id"])] = name
    return found


def _one_by_one(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields `messages` with one call in each message, which the results of the call follow."""
    waiting: list[dict[str, Any]] = []  # messages with one call each, whose results may come
    for message in messages:
        if message.get("role") == "tool":
            found = [each for each in waiting if _is_result(message, each)]
            yield from found
            waiting = [each for each in waiting if each not in found]
        else:
            yield from waiting
            waiting = []
        if _num_calls(message) > 1:
            first, *others = message["tool_calls"]
            yield {**message, "tool_calls": [first]}
            role = message.get("role")
            waiting = [{"role": role, "content": None, "tool_calls": [call]} for call in others]
        else:
            yield message
    yield from waiting


def _is_result(result: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    (call,) = message["tool_calls"]
    return isinstance(call, dict) and call.get("id") == result.get("tool_call_id")


def _probe_turn(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def _probe_result(call_id: str = _CALL_ID) -> dict[str, Any]:
    return {"role": "tool", "content": _TEXT, "tool_call_id": call_id}


def _probe_call(name: str = _NAME) -> dict[str, Any]:
    function = {"name": name, "arguments": {_KEY: _VALUE}}
    return {"id": _CALL_ID, "type": "function", "function": function}


def _is_missing(mark: str, text: str, *, has_tools: bool) -> bool:
    """Returns whether `text` lacks `mark`.

    The name of a tool also occurs once in its declaration.
    """
    return text.count(mark) < (2 if mark == _NAME and has_tools else 1)


# -- forms of contents and calls -------------------------------------------------------------------


def _content_kind(message: Mapping[str, Any]) -> _Content:
    if "content" not in message:
        return _Content.ABSENT
    content = message["content"]
    if content is None:
        return _Content.NULL
    if content in ("", []):
        return _Content.EMPTY
    return _Content.PARTS if isinstance(content, list) else _Content.TEXT


def _content(content: object, form: _Content) -> object:
    """Returns `content` as a text or as parts.

    Raises ChatTemplateFailed for parts that are no texts.
    """
    if isinstance(content, list):
        texts = [_text_of_part(part) for part in content] or [""]
    elif content is None or isinstance(content, str):
        texts = [content or ""]
    else:
        return content
    if form is _Content.PARTS:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _text_of_part(part: object) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ChatTemplateFailed(f"parts of a message's content must be texts, got {kind!r}")


def _tool_call(call: object, *, parses: bool) -> object:
    """Returns `call` with its arguments as values, or as JSON text."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    arguments = call["function"].get("arguments")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str) and parses:
        arguments = _parsed(arguments)
    elif not isinstance(arguments, str) and not parses:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _parsed(arguments: str) -> object:
    """Parses `arguments` as a JSON object; returns the text itself if it is none."""
    if not arguments.strip():
        return {}
    try:
        value = parse_json(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def text_arguments(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns which call has arguments that are no JSON object; None if there is none.

    Templates that write each argument by itself fail for such calls, which may be answers cut by
    `max_tokens`.
    """
    for message in messages:
        for call in message["tool_calls"] if _num_calls(message) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                continue
            arguments = function.get("arguments")
            if isinstance(arguments, str) and isinstance(_parsed(arguments), str):
                return (
                    f"arguments of the past call of {function.get('name')!r} are "
                    f"{arguments[:_MAX_SHOWN_CHARS]!r}; allowed with this template: a JSON object"
                )
    return None
