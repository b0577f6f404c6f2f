"""Messages that no client of ours sends: random fields, or changed bytes."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_INT32 = st.integers(-(2**31), 2**31 - 1)
_INT64 = st.integers(-(2**63), 2**63 - 1)
_SMALL = st.integers(-2, 130)
_TEXT = st.one_of(
    st.sampled_from(["", "a", "fake", "\n\x1b[2J\u202e", "x" * 200, "127.0.0.1:1", "ff" * 32]),
    st.text(max_size=20),
)
_OF_TYPE: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT32: _SMALL | _INT32,
    FieldDescriptor.TYPE_INT64: _SMALL | _INT64,
    FieldDescriptor.TYPE_UINT32: st.integers(0, 3) | st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 3) | st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_SFIXED32: _INT32,
    FieldDescriptor.TYPE_SFIXED64: _INT64,
    FieldDescriptor.TYPE_SINT32: _SMALL | _INT32,
    FieldDescriptor.TYPE_SINT64: _SMALL | _INT64,
    FieldDescriptor.TYPE_FLOAT: st.sampled_from([0.0, 1.0, 0.5, -1.0]) | st.floats(width=32),
    FieldDescriptor.TYPE_DOUBLE: st.sampled_from([0.0, 1.0, 0.5, -1.0]) | st.floats(),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: _TEXT,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=64),
    FieldDescriptor.TYPE_ENUM: st.integers(-1, 12) | _INT32,
}
_MAX_REPEATED = 4
_MAX_DEPTH = 4


# JSON values of any kind.
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, -1, 0.5, 2**31, 2**63, 2**64, -(2**63), 1e308, 10**30]),
    st.sampled_from(["", "x", "auto", "none", "user", "text", "json_schema", "\n\x00\u202e"]),
    st.text(max_size=8),
)
json_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["type", "name", "content", "role", "schema", "text", "properties"])
            | st.text(max_size=4),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=8,
)


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """A message of which some fields are set to anything that they can hold."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw(st.integers(0, 2)) == 0:
            _fill(draw, message, field, depth)
    return message


def _fill(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    entry = field.message_type
    if entry is None:
        values = _OF_TYPE[field.type]
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values, max_size=_MAX_REPEATED)))
        else:
            setattr(message, field.name, draw(values))
    elif depth >= _MAX_DEPTH:
        return
    elif entry.GetOptions().map_entry:
        _fill_map(draw, message, field, depth)
    elif field.is_repeated:
        for _ in range(draw(st.integers(0, _MAX_REPEATED))):
            getattr(message, field.name).add().CopyFrom(draw(messages(entry, depth + 1)))
    else:
        getattr(message, field.name).CopyFrom(draw(messages(entry, depth + 1)))


def _fill_map(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    entry = field.message_type
    assert entry is not None, "the entries of a map are messages"
    key, value = (entry.fields_by_name[name] for name in ("key", "value"))
    for _ in range(draw(st.integers(0, _MAX_REPEATED))):
        at = draw(_OF_TYPE[key.type])
        if value.message_type is None:
            getattr(message, field.name)[at] = draw(_OF_TYPE[value.type])
        else:
            content = draw(messages(value.message_type, depth + 1))
            getattr(message, field.name)[at].CopyFrom(content)


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with some of its bytes changed, gone, twice or new."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(changed)))
        end = min(len(changed), start + draw(st.integers(0, 8)))
        how = draw(st.sampled_from(("replace", "remove", "repeat", "cut")))
        if how == "replace":
            changed[start:end] = draw(st.binary(max_size=8))
        elif how == "remove":
            del changed[start:end]
        elif how == "repeat":
            changed[start:start] = changed[start:end]
        else:
            del changed[start:]
    return bytes(changed)
