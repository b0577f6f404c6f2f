"""Columns of the step contract: fixed-width little-endian elements without a header."""

import struct
from collections.abc import Iterable
from itertools import pairwise

from splitserve.executor.v1 import executor_pb2 as pb


class Refusal(Exception):
    """A batch breaks the contract; becomes a StepResult with status REFUSED."""

    def __init__(self, reason: pb.StepErrorReason, field: str, message: str) -> None:
        super().__init__(f"{pb.StepErrorReason.Name(reason)} {field}: {message}")
        self.reason = reason
        self.field = field
        self.message = message


def malformed(field: str, message: str) -> Refusal:
    """The refusal for columns that contradict each other."""
    return Refusal(pb.STEP_ERROR_REASON_MALFORMED, field, message)


def i32(values: Iterable[int]) -> bytes:
    """Packs signed 32-bit elements."""
    elements = list(values)
    return struct.pack(f"<{len(elements)}i", *elements)


def f32(values: Iterable[float]) -> bytes:
    """Packs IEEE 754 singles."""
    elements = list(values)
    return struct.pack(f"<{len(elements)}f", *elements)


def as_f32(value: float) -> float:
    """The nearest IEEE 754 single."""
    (single,) = struct.unpack("<f", struct.pack("<f", value))
    return float(single)


def _unpack(data: bytes, code: str, width: int, field: str) -> list[int]:
    if len(data) % width:
        raise malformed(field, f"{len(data)} bytes are not a multiple of {width}")
    return list(struct.unpack(f"<{len(data) // width}{code}", data))


def read_i32(data: bytes, field: str) -> list[int]:
    """Unpacks an i32 column. Raises `Refusal` (MALFORMED)."""
    return _unpack(data, "i", 4, field)


def read_i64(data: bytes, field: str) -> list[int]:
    """Unpacks an i64 column. Raises `Refusal` (MALFORMED)."""
    return _unpack(data, "q", 8, field)


def check_length(values: list[int], length: int, field: str) -> list[int]:
    """Returns `values`. Raises `Refusal` (MALFORMED) if there are not `length` of them."""
    if len(values) != length:
        raise malformed(field, f"{len(values)} elements, its parallel columns have {length}")
    return values


def read_groups(offsets: bytes, data: list[int], count: int, field: str) -> list[list[int]]:
    """Splits `data` by an offsets column into `count` groups. Raises `Refusal` (MALFORMED)."""
    bounds = read_i32(offsets, field)
    if count == 0 and not bounds:
        bounds = [0]
    check_length(bounds, count + 1, field)
    pairs = list(pairwise(bounds))
    if bounds[0] != 0 or bounds[-1] != len(data) or any(a > b for a, b in pairs):
        raise malformed(field, f"{bounds} do not delimit {len(data)} elements")
    return [data[start:end] for start, end in pairs]
