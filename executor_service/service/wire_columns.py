"""Columns of the contract as arrays that lie in the bytes of the message."""

from __future__ import annotations

import numpy as np

from executor_service.steps.batch import BatchRefused, StepErrorReason
from executor_service.steps.step import Int32Array, Int64Array

INT32 = np.dtype("<i4")
INT64 = np.dtype("<i8")
FLOAT32 = np.dtype("<f4")
UINT8 = np.dtype("u1")
_NO_INT32 = np.empty(0, INT32)


def read_int32(column: bytes, path: str) -> Int32Array:
    """The elements of an i32 column. Raises BatchRefused if it is none."""
    if not column:
        return _NO_INT32
    if len(column) % 4:
        raise _no_column(column, 4, path)
    return np.frombuffer(column, INT32)


def read_int64(column: bytes, path: str) -> Int64Array:
    """The elements of an i64 column. Raises BatchRefused if it is none."""
    if len(column) % 8:
        raise _no_column(column, 8, path)
    return np.frombuffer(column, INT64)


def read_offsets(column: bytes, path: str) -> Int32Array:
    """An offsets column; for no things, the empty column stands for the one element 0."""
    return read_int32(column or bytes(4), path)


def read_optional_offsets(column: bytes, num_things: int, path: str) -> Int32Array:
    """An offsets column that is empty where no thing has any element."""
    return read_int32(column, path) if column else np.zeros(num_things + 1, np.int32)


def _no_column(column: bytes, width: int, path: str) -> BatchRefused:
    return BatchRefused(
        StepErrorReason.MALFORMED, path, f"{len(column)} bytes; allowed: a multiple of {width}"
    )
