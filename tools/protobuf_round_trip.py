"""Fills every message of every proto, and writes it to a file or reads it back from one.

Used by check_protobuf_majors.sh, in two environments with different majors of protobuf.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import google.protobuf
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

ROOT = Path(__file__).resolve().parent.parent / "protos"
MAX_DEPTH = 4  # of messages within messages


def main() -> int:
    """Writes or reads, or says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--major", help="fail unless protobuf has this major version")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--read", type=Path, metavar="FILE")
    options = parser.parse_args()
    version = google.protobuf.__version__
    if options.major and version.split(".")[0] != options.major:
        sys.stderr.write(f"protobuf {version} is installed, {options.major} is needed\n")
        return 1
    sys.path.insert(0, str(ROOT))
    filled = {name: filled_message(kind) for name, kind in message_types()}
    if options.write:
        wire = {n: m.SerializeToString(deterministic=True).hex() for n, m in filled.items()}
        options.write.write_text(json.dumps(wire, indent=0, sort_keys=True))
    if options.read:
        wire = json.loads(options.read.read_text())
        wrong = [n for n, m in filled.items() if m != type(m).FromString(bytes.fromhex(wire[n]))]
        if wrong or wire.keys() != filled.keys():
            sys.stderr.write(f"protobuf {version} reads something else: {wrong}\n")
            return 1
    verb = "writes" if options.write else "reads"
    sys.stdout.write(f"protobuf {version} {verb} {len(filled)} messages\n")
    return 0


def message_types() -> Iterator[tuple[str, type[Message]]]:
    """Every top-level message of the generated code; importing the stubs is part of the check."""
    for path in sorted(ROOT.glob("splitserve/**/*_pb2.py")):
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        module = importlib.import_module(name)
        importlib.import_module(f"{name}_grpc")
        for message_name, descriptor in module.DESCRIPTOR.message_types_by_name.items():
            yield descriptor.full_name, getattr(module, message_name)


def filled_message(kind: type[Message], depth: int = 0) -> Message:
    """A message with a value in every field (in the last field of every oneof)."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        target = getattr(message, field.name)
        if field.message_type is None:
            _fill_scalar(message, field.name)
        elif field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[part] for part in ("key", "value"))
            target[_scalar(key)] = _scalar(value)
        elif depth < MAX_DEPTH:
            is_list = hasattr(target, "add")
            child = target.add() if is_list else target
            child.CopyFrom(filled_message(type(child), depth + 1))
    return message


def _scalar(field: FieldDescriptor) -> object:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    if field.type == field.TYPE_BYTES:
        return bytes(range(field.number))
    return _SCALARS[field.cpp_type](field.number)


def _fill_scalar(message: Message, name: str) -> None:
    value = _scalar(message.DESCRIPTOR.fields_by_name[name])
    target = getattr(message, name)
    if hasattr(target, "append"):
        target.extend([value, value])
    else:
        setattr(message, name, value)


_SCALARS: dict[int, Callable[[int], object]] = {
    1: lambda number: -number,  # int32
    2: lambda number: -(2**40) - number,  # int64
    3: lambda number: number,  # uint32
    4: lambda number: 2**40 + number,  # uint64
    5: lambda number: number + 0.1,  # double
    6: lambda number: number + 0.5,  # float
    7: lambda number: True,  # bool
    9: lambda number: f"field {number} é",  # string
}


if __name__ == "__main__":
    sys.exit(main())
