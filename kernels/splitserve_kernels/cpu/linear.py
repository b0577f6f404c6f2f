"""Matrix products with packed weights.

Shape letters: N outputs, K inputs, M rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve_kernels.cpu.library import CLinear, NativeLibrary, pointer


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weight matrix [N, K] in panels (gemm.h), with bias and scales, padded to whole panels.

    `dtype`: of the rows it is multiplied with. `scales`: None if the panels have that dtype too;
    otherwise the panels hold integers (int8_weights.h).
    """

    panels: Tensor
    bias: Tensor | None
    scales: Tensor | None
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Total bytes of panels, bias and scales."""
        tensors = (self.panels, self.bias, self.scales)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def as_c(self) -> CLinear:
        """Returns the C structure of the matrix; the structure does not keep the tensors alive."""
        return CLinear(
            pointer(self.panels),
            pointer(self.bias),
            pointer(self.scales),
            self.num_outputs,
            self.num_inputs,
        )


@dataclass(frozen=True, slots=True)
class WeightRows:
    """Rows of a weight matrix [N, K], at arbitrary addresses.

    `addresses`: [N] int64, 0 for a row of zeros. `sources`: the contiguous matrices that hold the
    rows; all of one dtype and with K inputs.
    """

    addresses: npt.NDArray[np.int64]
    sources: tuple[Tensor, ...]

    @classmethod
    def of(cls, weight: Tensor) -> WeightRows:
        """Returns the rows of `weight` [N, K]."""
        weight = weight.detach().contiguous()
        row_bytes = weight.shape[1] * weight.itemsize
        addresses = weight.data_ptr() + np.arange(weight.shape[0], dtype=np.int64) * row_bytes
        return cls(addresses, (weight,))


def pack(
    library: NativeLibrary,
    rows: WeightRows,
    bias: Tensor | None = None,
    *,
    is_int8: bool = False,
) -> PackedLinear:
    """Packs `rows` [N, K], float32 or bfloat16, and `bias` [N]; copies both.

    K must be even for bfloat16. `is_int8`: rounds weights to integers from -127 to 127, times one
    scale per output. An output with a weight that is not finite then becomes NaN.
    """
    num_outputs, source = len(rows.addresses), rows.sources[0]
    num_inputs = source.shape[1]
    padded = -(-num_outputs // library.panel) * library.panel
    panels = torch.empty(padded * num_inputs, dtype=torch.int8 if is_int8 else source.dtype)
    scales = torch.empty(padded) if is_int8 else None
    library.call(
        "pack_int8" if is_int8 else "pack",
        source.dtype,
        ctypes.c_void_p(rows.addresses.ctypes.data),
        ctypes.c_int32(num_outputs),
        ctypes.c_int32(num_inputs),
        pointer(panels),
        *([pointer(scales)] if is_int8 else []),
        ctypes.c_int32(torch.get_num_threads()),
    )
    padded_bias = None
    if bias is not None:
        padded_bias = torch.zeros(padded)
        padded_bias[:num_outputs] = bias.detach()
    return PackedLinear(panels, padded_bias, scales, num_outputs, num_inputs, source.dtype)


def linear(library: NativeLibrary, weights: PackedLinear, rows: Tensor) -> Tensor:
    """Multiplies `rows` [M, K] with the weights and adds the bias: [M, N], in the weights' dtype.

    Sums are float32. The result of a row is bit-identical whatever the other rows are.
    """
    rows = rows.contiguous()
    output = rows.new_empty(rows.shape[0], weights.num_outputs)
    library.call(
        "linear",
        weights.dtype,
        ctypes.byref(weights.as_c()),
        pointer(rows),
        ctypes.c_int32(rows.shape[0]),
        pointer(output),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return output
