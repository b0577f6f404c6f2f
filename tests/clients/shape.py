"""Differences between two answers to one request: `differences`.

The *shape* of JSON is the set of types at each path; `[]` stands for any index, `{}` for any key of
an object whose keys are data. A stream is compared in what order its events come, and in the shape
of each kind of event; how many events carry the text is left to the server. Beside shapes the
*facts* are compared: what a client asked for (texts, tokens, calls, reasons, counts). What a server
makes up for itself, such as ids, is no fact.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tests.clients.exchange import Answer

ABSENT = "absent"
ORDER = "order of events"
# Objects whose keys are data: tokens, token ids, numbers of a schema.
_KEYED_BY_DATA = ("top_logprobs[]", "prompt_logprobs[]", "metadata", "properties")
# What a server makes up, or says in its own words.
_FREE = frozenset(
    {
        *("id", "item_id", "call_id", "created", "created_at", "sequence_number"),
        *("model", "owned_by", "root", "max_model_len", "version", "system_fingerprint"),
        *("message", "service_tier"),
    }
)
# How much was cached is up to block sizes.
_FREE_BELOW = frozenset({"permission", "prompt_tokens_details", "input_tokens_details"})
_LOGPROB_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """At `path` of the answer to the request named `request`: what they said, and what we do."""

    request: str
    path: str
    theirs: str
    ours: str

    def __str__(self) -> str:
        return f"{self.request} | {self.path} | {self.theirs} | {self.ours}"


Shape = dict[str, set[str]]


def differences(request: str, theirs: Answer, ours: Answer, facts: bool = True) -> list[Difference]:
    """All of them, by path; with `facts` false (what is drawn at random) those of shape alone.

    A status or content type that differs is the only difference: the rest then has to.
    """
    outer = [
        Difference(request, name, str(getattr(theirs, name)), str(getattr(ours, name)))
        for name in ("status", "content_type")
        if getattr(theirs, name) != getattr(ours, name)
    ]
    if outer:
        return outer
    left, right = _shape_of_answer(theirs), _shape_of_answer(ours)
    found = [
        Difference(request, path, _said(left, path), _said(right, path))
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    ]
    return [*_outermost(found), *(_facts_that_differ(request, theirs, ours) if facts else ())]


def _said(shape: Shape, path: str) -> str:
    return " or ".join(sorted(shape.get(path, {ABSENT})))


def _outermost(found: list[Difference]) -> list[Difference]:
    """Without what only follows: where an object is absent, so is all that is in it."""
    lost = {item.path for item in found if _is_container_lost(item)}
    return [
        item
        for item in found
        if not any(item.path.startswith((path + ".", path + "[", path + "{")) for path in lost)
    ]


def _is_container_lost(item: Difference) -> bool:
    containers = [
        {"array", "object"} & set(said.split(" or ")) for said in (item.theirs, item.ours)
    ]
    return containers[0] != containers[1]


def _shape_of_answer(answer: Answer) -> Shape:
    if answer.events is None:
        return _shape([answer.body], "body")
    shape: Shape = {ORDER: {_order(answer.events)}}
    by_kind = defaultdict(list)
    for name, data in answer.events:
        by_kind[_kind(data)].append(data)
        shape.setdefault(f"{_kind(data)}: event", set()).add(str(name))
    for kind, data in by_kind.items():
        shape |= _shape(data, f"{kind}: data")
    return shape


def _shape(values: Iterable[Any], root: str) -> Shape:
    shape: Shape = defaultdict(set)
    for value in values:
        for path, leaf in _walk(value, root, by_index=False):
            shape[path].add(_type(leaf))
    return dict(shape)


def _walk(value: object, path: str, by_index: bool) -> Iterator[tuple[str, object]]:
    """Every value in `value`, containers too, with its path."""
    yield path, value
    if isinstance(value, dict):
        is_data = path.endswith(_KEYED_BY_DATA) and not by_index
        for key, item in value.items():
            yield from _walk(item, path + ("{}" if is_data else f".{key}"), by_index)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}[{index if by_index else ''}]", by_index)


def _type(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _kind(data: dict[str, Any] | str) -> str:
    """What an event of a stream is for."""
    if isinstance(data, str):
        return "done"
    if "type" in data:
        return str(data["type"])
    if "error" in data:
        return "error"
    if not data["choices"]:
        return "usage"
    choice = data["choices"][0]
    if choice["finish_reason"] is not None:
        return "finish"
    delta = choice.get("delta", {})
    return next((name for name in ("role", "reasoning", "tool_calls") if delta.get(name)), "text")


def _order(events: list[list[Any]]) -> str:
    """The kinds in their order, choice by choice, each once as long as it repeats."""
    by_choice: dict[Any, list[str]] = defaultdict(list)
    for _, data in events:
        choices = data.get("choices") if isinstance(data, dict) else None
        by_choice[choices[0]["index"] if choices else "end"].append(_kind(data))
    return "; ".join(
        " ".join(kind for kind, _ in groupby(kinds))
        for _, kinds in sorted(by_choice.items(), key=lambda item: str(item[0]))
    )


def _facts_that_differ(request: str, theirs: Answer, ours: Answer) -> Iterator[Difference]:
    """Of what both say: where one says nothing, shapes have shown it."""
    left, right = _facts(theirs), _facts(ours)
    for path in sorted(left.keys() & right.keys()):
        if not _is_same(left[path], right[path]):
            yield Difference(
                request, f"value of {path}", *map(json.dumps, (left[path], right[path]))
            )


def _facts(answer: Answer) -> dict[str, object]:
    facts = answer.body if answer.events is None else _assemble(answer.events)
    return {
        path: _parsed(leaf) if isinstance(leaf, str) and path.endswith(".arguments") else leaf
        for path, leaf in _walk(facts, "body", by_index=True)
        if not isinstance(leaf, dict | list) and not _is_free(path)
    }


def _is_free(path: str) -> bool:
    names = [name.partition("[")[0] for name in path.split(".")]
    return names[-1] in _FREE or not _FREE_BELOW.isdisjoint(names)


def _parsed(arguments: str) -> object:
    """JSON, if it is: white space in it is up to the model."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _is_same(left: object, right: object) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) <= _LOGPROB_TOLERANCE
    return bool(left == right)


def _assemble(events: list[list[Any]]) -> dict[str, Any]:
    """What the events of a stream say together. Of responses: the last event says it all."""
    *said, last = [data for _, data in events if data != "[DONE]"]
    if "type" in last:
        return dict(last)
    whole: dict[str, Any] = {}
    for data in [*said, last]:
        for choice in data.get("choices", ()):
            _add(whole.setdefault(f"choice {choice['index']}", {}), choice)
        if "usage" in data:
            whole["usage"] = data["usage"]
    return whole


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds `part` of a stream to `whole`: texts and lists go on, objects do so by key."""
    for key, value in part.items():
        if isinstance(value, dict):
            _add(whole.setdefault(key, {}), value)
        elif key == "tool_calls":
            for call in value:
                _add(whole.setdefault(key, {}).setdefault(f"call {call['index']}", {}), call)
        elif isinstance(value, list) or (isinstance(value, str) and key in _CONTINUED):
            whole[key] = whole.get(key, type(value)()) + value
        elif value is not None:
            whole[key] = value


_CONTINUED = frozenset({"text", "content", "reasoning", "arguments"})
