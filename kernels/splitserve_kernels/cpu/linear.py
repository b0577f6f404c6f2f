"""Matrix products with packed weights.

Shape letters: N outputs, K inputs, M rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve_kernels.cpu.library import CLinear, NativeLibrary, pointer


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight matrix [N, K] in panels (see gemm.h), and its bias, padded to whole panels."""

    panels: Tensor
    bias: Tensor | None
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype

    def as_c(self) -> CLinear:
        """The structure that kernels take; it does not keep the tensors alive."""
        return CLinear(pointer(self.panels), pointer(self.bias), self.num_outputs, self.num_inputs)


def pack(library: NativeLibrary, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Packs `weight` [N, K], float32 or bfloat16, and `bias` [N]; both are copied.

    K must be even for bfloat16.
    """
    num_outputs, num_inputs = weight.shape
    padded = -(-num_outputs // library.panel) * library.panel
    weight = weight.detach().contiguous()
    panels = torch.empty(padded * num_inputs, dtype=weight.dtype)
    threads = ctypes.c_int32(torch.get_num_threads())
    library.call(
        "pack",
        weight.dtype,
        pointer(weight),
        ctypes.c_int32(num_outputs),
        ctypes.c_int32(num_inputs),
        pointer(panels),
        threads,
    )
    padded_bias = None
    if bias is not None:
        padded_bias = torch.zeros(padded)
        padded_bias[:num_outputs] = bias.detach()
    return PackedLinear(panels, padded_bias, num_outputs, num_inputs, weight.dtype)


def linear(library: NativeLibrary, weights: PackedLinear, rows: Tensor) -> Tensor:
    """`rows` [M, K] times the weights, plus the bias: [M, N], in the dtype of the weights.

    Sums are float32. A row's result does not depend on the other rows, not even in its last bit.
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
