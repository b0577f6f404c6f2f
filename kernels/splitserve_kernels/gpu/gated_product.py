"""SiLU of the gate times the up projection, in one kernel.

Source: Shazeer, "GLU Variants Improve Transformer", 2020. Rounds where Hugging Face's Llama rounds:
the SiLU, and the product.

Shape letters: T tokens, I width of the MLP.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.integers import ceil_div

_BLOCK = 1024


def gated_product(gate_up: Tensor) -> Tensor:
    """Returns SiLU(gate) * up, [T, I], in the dtype of `gate_up`.

    `gate_up`: [T, 2I], gates first, contiguous.
    """
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    product = gate_up.new_empty(num_tokens, width)
    if num_tokens:
        _gated_product_kernel[(num_tokens, ceil_div(width, _BLOCK))](
            gate_up, product, WIDTH=width, BLOCK=_BLOCK, num_warps=4
        )
    return product


@triton.jit
def _gated_product_kernel(
    gate_up: tl.tensor, product: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Computes some outputs of one token."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = dims < WIDTH
    gates = gate_up + token * (2 * WIDTH) + dims
    loaded = tl.load(gates, mask=mask, other=0.0)
    gate = loaded.to(tl.float32)
    up = tl.load(gates + WIDTH, mask=mask, other=0.0).to(tl.float32)
    # The exponential of the negative absolute value cannot overflow.
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0.0, 1.0, small) / (1.0 + small)
    silu = (gate * sigmoid).to(loaded.dtype).to(tl.float32)
    tl.store(product + token * WIDTH + dims, (silu * up).to(loaded.dtype), mask=mask)
