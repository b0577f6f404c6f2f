"""Checks of single columns; each says which element is wrong and what is allowed.

All raise BatchRefused and change nothing. `path` is the field as the contract names it.
"""

from __future__ import annotations

import numpy as np
import numpy.ma  # np.unique would load it at its first call, in a step

from executor_service.steps.batch import BatchRefused, StepErrorReason
from executor_service.steps.step import BoolArray, Int32Array, Int64Array, UInt8Array

_Column = Int32Array | Int64Array | UInt8Array


def check_below(
    column: Int32Array, limit: int, reason: StepErrorReason, path: str, *, low: int = 0
) -> None:
    """Each element is in `low` .. limit-1; `low` is 0 or -1."""
    if len(column) == 0:
        return
    # As unsigned numbers, negative ones are the largest.
    unsigned = column.view(np.uint32)
    if np.maximum.reduce(unsigned) >= limit:
        is_wrong = (column < low) | (column >= limit)
        if low == 0 or np.count_nonzero(is_wrong):
            allowed = f"allowed: {low} .. {limit - 1}" if limit > low else "there is none"
            raise _refusal_of_first(is_wrong, column, reason, path, allowed)


def check_at_least(column: Int32Array, low: int, reason: StepErrorReason, path: str) -> None:
    """Each element is `low` or more."""
    if len(column) and np.minimum.reduce(column) < low:
        raise _refusal_of_first(column < low, column, reason, path, f"allowed: {low} or more")


def check_not_above(
    column: Int32Array, limits: Int32Array, reason: StepErrorReason, path: str
) -> None:
    """Element i is at most `limits[i]`."""
    is_wrong = column > limits
    if np.count_nonzero(is_wrong):
        index = int(is_wrong.argmax())
        raise BatchRefused(
            reason, path, f"element {index} is {column[index]}; allowed: at most {limits[index]}"
        )


def check_all(is_right: BoolArray, column: Int32Array, path: str, problem: str) -> None:
    """`is_right` holds everywhere; else the element is MALFORMED."""
    if np.count_nonzero(is_right) != len(column):
        raise _refusal_of_first(~is_right, column, StepErrorReason.MALFORMED, path, problem)


def check_rows(column: Int32Array, exists: BoolArray, path: str) -> None:
    """Each element is a row id in range, distinct, and a row that exists."""
    check_below(column, len(exists), StepErrorReason.LIMIT_EXCEEDED, path)
    others = exists.copy()
    # Assigning through 32-bit indexes is several times slower.
    others[column.astype(np.intp)] = False
    if np.count_nonzero(exists) - np.count_nonzero(others) == len(column):
        return
    if not exists[column].all():
        allowed = "the row table has no such row"
        raise _refusal_of_first(~exists[column], column, StepErrorReason.ROW_UNKNOWN, path, allowed)
    _refuse_duplicate(column, StepErrorReason.MALFORMED, path)


def check_free_rows(column: Int32Array, exists: BoolArray, path: str) -> None:
    """Each element is a row id in range, distinct, and no row that exists."""
    check_below(column, len(exists), StepErrorReason.LIMIT_EXCEEDED, path)
    if exists[column].any():
        allowed = "allowed: a row that is not in the row table, or that is removed"
        raise _refusal_of_first(exists[column], column, StepErrorReason.ROW_EXISTS, path, allowed)
    if len(np.unique(column)) != len(column):
        _refuse_duplicate(column, StepErrorReason.MALFORMED, path)


def check_distinct_blocks(column: Int32Array, path: str) -> None:
    """No block occurs twice (BLOCK_OVERLAP)."""
    if len(column) > 1 and len(np.unique(column)) != len(column):
        _refuse_duplicate(column, StepErrorReason.BLOCK_OVERLAP, path)


def check_length(column: _Column, length: int, path: str, parallel: str) -> None:
    """The column has `length` elements, as `parallel` says."""
    if len(column) != length:
        raise BatchRefused(
            StepErrorReason.MALFORMED,
            path,
            f"{len(column)} elements; allowed: {length}, because of {parallel}",
        )


def check_offsets(offsets: Int32Array, num_things: int, num_elements: int, path: str) -> None:
    """`offsets` delimit `num_elements` elements of `num_things` things."""
    if num_things == 0 and len(offsets) == 0:
        problem = "" if num_elements == 0 else f"empty for {num_elements} elements"
    elif len(offsets) != num_things + 1:
        problem = f"{len(offsets)} elements; allowed: {num_things + 1}"
    elif offsets[0] != 0:
        problem = f"element 0 is {offsets[0]}; allowed: 0"
    elif np.count_nonzero(offsets[1:] < offsets[:-1]):
        index = int((offsets[1:] < offsets[:-1]).argmax()) + 1
        problem = f"element {index} is {offsets[index]}; allowed: at least {offsets[index - 1]}"
    elif offsets[-1] != num_elements:
        problem = f"the last element is {offsets[-1]}; allowed: {num_elements}"
    else:
        return
    if problem:
        raise BatchRefused(StepErrorReason.MALFORMED, path, problem)


def _refusal_of_first(
    is_wrong: BoolArray, column: Int32Array, reason: StepErrorReason, path: str, allowed: str
) -> BatchRefused:
    index = int(is_wrong.argmax())
    return BatchRefused(reason, path, f"element {index} is {column[index]}; {allowed}")


def _refuse_duplicate(column: Int32Array, reason: StepErrorReason, path: str) -> None:
    seen: set[int] = set()
    for index, element in enumerate(column.tolist()):
        if element in seen:
            raise BatchRefused(
                reason, path, f"element {index} is {element}; allowed: each at most once"
            )
        seen.add(element)
