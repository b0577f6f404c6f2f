"""Fused operations of a layer: RMSNorm with the addition before it, and SiLU times a projection.

Each number is read once. Rounds where Hugging Face's Llama rounds: the sum, the normalised number,
and its product with the weight; the SiLU, and its product. Sources: Zhang and Sennrich, "Root Mean
Square Layer Normalization", 2019; Shazeer, "GLU Variants Improve Transformer", 2020.

Shape letters: T tokens, N norms of a token (1, or one for each head), W numbers of a norm, I width
of the MLP.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.launch import ceil_div, next_power_of_2

# Numbers that a program normalises at a time, unless one norm has more.
_TILE_SIZE = 2048
_NUMBERS_PER_WARP = 1024
_MAX_NUM_WARPS = 16


def rms_norm(numbers: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalises the last dimension of `numbers` in float32, and multiplies it with `weight`.

    `numbers`: [T, W] or [T, N, W], those of a token contiguous; `weight`: the same shape without T,
    contiguous, in the same dtype. Returns a new tensor, contiguous.
    """
    normed = numbers.new_empty(numbers.shape)
    _launch(numbers, None, weight, normed, numbers, epsilon)
    return normed


def add_rms_norm(
    numbers: Tensor, addend: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Returns the sum of `numbers` and `addend`, and its `rms_norm`.

    `addend`: shaped as `numbers`, contiguous. Returns new tensors, contiguous.
    """
    normed, total = numbers.new_empty(2, *numbers.shape)
    _launch(numbers, addend, weight, normed, total, epsilon)
    return total, normed


def _launch(
    numbers: Tensor,
    addend: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    total: Tensor,
    epsilon: float,
) -> None:
    """Launches the kernel; `total` is not written if `addend` is None."""
    width = numbers.shape[-1]
    num_norms = numbers[0].numel() // width if len(numbers) else 0
    num_rows = len(numbers) * num_norms
    if num_rows == 0:
        return
    block_w = next_power_of_2(width)
    block_r = max(1, min(_TILE_SIZE // block_w, next_power_of_2(num_norms)))
    num_warps = max(1, min(_MAX_NUM_WARPS, block_r * block_w // _NUMBERS_PER_WARP))
    _rms_norm_kernel[(ceil_div(num_rows, block_r),)](
        numbers,
        numbers if addend is None else addend,
        weight,
        normed,
        total,
        epsilon,
        num_rows,
        numbers.stride(0),
        IS_ADDED=addend is not None,
        NUM_NORMS=num_norms,
        WIDTH=width,
        BLOCK_R=block_r,
        BLOCK_W=block_w,
        num_warps=num_warps,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    numbers: tl.tensor,
    addend: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    epsilon: tl.tensor,
    num_rows: tl.tensor,
    token_stride: tl.tensor,
    IS_ADDED: tl.constexpr,
    NUM_NORMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """Computes some norms, of one or several tokens."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_W)
    mask = (rows < num_rows)[:, None] & (dims < WIDTH)[None, :]
    norms = (rows % NUM_NORMS)[:, None] * WIDTH + dims[None, :]
    offsets = rows[:, None] * WIDTH + dims[None, :]
    loaded = tl.load(
        numbers + (rows // NUM_NORMS)[:, None] * token_stride + norms, mask=mask, other=0.0
    )
    x = loaded.to(tl.float32)
    if IS_ADDED:
        added = x + tl.load(addend + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = added.to(loaded.dtype)
        tl.store(total + offsets, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + epsilon)
    x = (x * scale[:, None]).to(loaded.dtype).to(tl.float32)
    w = tl.load(weight + norms, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + offsets, (x * w).to(loaded.dtype), mask=mask)


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
