"""Repairs of Triton 3.6's interpreter, for tests on the CPU.

It turns arrays of one element into int, which numpy 2.4 refuses (triton-lang/triton, issue 9171);
it multiplies the bits of bfloat16 numbers, not the numbers; and it rounds to bfloat16 and to float8
by cutting off, or wrongly where the rounding carries into the exponent.
"""

from __future__ import annotations

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
