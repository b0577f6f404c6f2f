"""Repairs of Triton 3.6's interpreter, for tests on the CPU.

It turns arrays of one element into int, which numpy 2.4 refuses (triton-lang/triton, issue 9171);
it multiplies the bits of bfloat16 numbers, not the numbers; and it rounds to bfloat16 and to float8
by cutting off, or wrongly where the rounding carries into the exponent. It also spends half of its
time on work that it does anew for every operation; here that is done once.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter

Array = npt.NDArray[Any]

_DTYPES = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.uint8}


def repair() -> None:
    """Patches the interpreter of this process; for a second time, nothing changes."""
    if interpreter._convert_float is not _convert_float:
        interpreter._convert_float = _convert_float
        _repair_index()
        _repair_dot()
        _patch_once_a_launch()
        _look_up_dtypes()
        _keep_types_of_shapes()


def _convert_float(numbers: Array, source: Any, target: Any, _rounding: Any) -> Array:  # noqa: ANN401
    """`numbers` as `target`, rounded to nearest even; both hold bits where numpy has no dtype."""
    bits = np.ascontiguousarray(numbers).view(_BITS[numbers.itemsize])
    converted = torch.from_numpy(bits.copy()).view(_DTYPES[source]).to(_DTYPES[target])
    width = _BITS[converted.itemsize]
    result: Array = converted.view(getattr(torch, np.dtype(width).name)).numpy()
    return result.view(f"u{converted.itemsize}")


def _repair_index() -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:  # noqa: ANN401
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


def _repair_dot() -> None:
    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def widen(handle: Any) -> Any:  # noqa: ANN401
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = _convert_float(handle.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_wide_dot(self: Any, a: Any, b: Any, *arguments: Any) -> Any:  # noqa: ANN401
        return create_dot(self, widen(a), widen(b), *arguments)

    builder.create_dot = create_wide_dot


def _patch_once_a_launch() -> None:
    """What a kernel calls finds the language patched, and does not look at all of it again."""
    patch = interpreter._patch_lang
    patched: set[str] = set()

    def patch_what_is_not(function: Any) -> Any:  # noqa: ANN401
        wanted = _languages_of(function)
        if wanted <= patched:
            return interpreter._LangPatchScope()  # of no changes
        scope, is_launch = patch(function), not patched
        patched.update(wanted)
        if is_launch:
            restore = scope.restore

            def restore_and_forget() -> None:
                patched.clear()
                restore()

            scope.restore = restore_and_forget
        return scope

    interpreter._patch_lang = patch_what_is_not


@functools.cache
def _languages_of(function: Any) -> frozenset[str]:  # noqa: ANN401
    """The modules of the language that a function sees."""
    seen = function.__globals__.values()
    return frozenset(module.__name__ for module in (tl, tl.core) if any(s is module for s in seen))


def _look_up_dtypes() -> None:
    find, found = interpreter._get_np_dtype, {}

    def look_up(dtype: Any) -> Any:  # noqa: ANN401
        scalar = dtype.scalar
        if isinstance(scalar, tl.pointer_type):
            return np.dtype(np.uint64)
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = look_up


def _keep_types_of_shapes() -> None:
    """A tuple's type names each of its numbers; most tuples are shapes, and there are few."""
    make, kept = tl.core._type_for_tuple_values, {}

    def type_of(values: Any, fields: Any = None) -> Any:  # noqa: ANN401
        if fields is not None or any(type(value) is not int for value in values):
            return make(values, fields)
        key = tuple(values)
        if key not in kept:
            kept[key] = make(values)
        return kept[key]

    tl.core._type_for_tuple_values = type_of
