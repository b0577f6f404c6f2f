"""Where two messages differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from google.protobuf.message import Message

from splitserve.executor.v1 import executor_pb2 as executor

NOTHING = "nothing"

# Bytes that are messages themselves, by the name of their field.
_MESSAGES: Mapping[str, type[Message]] = MappingProxyType(
    {"batch": executor.ScheduleBatch, "result": executor.StepResult}
)
# Columns that are not i32; see executor.proto.
_DTYPES = MappingProxyType({"seeds": "<i8", "samples": "|u1", "row_statuses": "|u1"})


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """The first field in which a replay differs from its record."""

    field: str
    recorded: str
    replayed: str


def find_difference(recorded: Message, replayed: Message, at: str = "") -> FieldDifference | None:
    """The first difference of two messages of one type, None if they are equal."""
    for field in recorded.DESCRIPTOR.fields:
        name = field.name
        path = f"{at}.{name}" if at else name
        if field.has_presence and recorded.HasField(name) != replayed.HasField(name):
            ours, theirs = (
                _in_short(getattr(message, name)) if message.HasField(name) else NOTHING
                for message in (recorded, replayed)
            )
            return FieldDifference(path, ours, theirs)
        found = _compare(getattr(recorded, name), getattr(replayed, name), name, path)
        if found is not None:
            return found
    return None


def _compare(recorded: Any, replayed: Any, name: str, path: str) -> FieldDifference | None:  # noqa: ANN401
    """Two values of one field."""
    if recorded == replayed:
        return None
    if isinstance(recorded, Message):
        return find_difference(recorded, replayed, path)
    if isinstance(recorded, bytes):
        if name in _MESSAGES:
            parse = _MESSAGES[name].FromString
            return find_difference(parse(recorded), parse(replayed), path)
        recorded, replayed = _column(name, recorded), _column(name, replayed)
    if isinstance(recorded, (str, int, float, Mapping)):
        return FieldDifference(path, _in_short(recorded), _in_short(replayed))
    return _compare_items(recorded, replayed, name, path)


def _compare_items(recorded: Any, replayed: Any, name: str, path: str) -> FieldDifference | None:  # noqa: ANN401
    for index, (ours, theirs) in enumerate(zip(recorded, replayed, strict=False)):
        found = _compare(ours, theirs, name, f"{path}[{index}]")
        if found is not None:
            return found
    if len(recorded) == len(replayed):
        return None
    lengths = (f"{len(items)} elements" for items in (recorded, replayed))
    return FieldDifference(path, *lengths)


def _column(name: str, data: bytes) -> list[int] | bytes:
    dtype = np.dtype(_DTYPES.get(name, "<i4"))
    if len(data) % dtype.itemsize:
        return data
    numbers: list[int] = np.frombuffer(data, dtype).tolist()
    return numbers


def _in_short(value: object) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


_MAX_CHARS = 200
