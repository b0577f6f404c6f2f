"""Products of 8-bit floats with 8-bit floats, by `torch._scaled_mm`.

Each row of the activations is rounded to float8_e4m3fn with a scale of its own, so that its largest
number becomes the largest of float8. A row's result does not depend on other rows as far as the
product of the library does not. Weights have one scale, or one for each output; for blocks of
weights use `quantized_linear`, which does not round activations.

Shape letters: M rows, N outputs, K inputs.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.kv_write import store_rounded
from splitserve_kernels.gpu.launch import FLOAT8_MAX, next_power_of_2
from splitserve_kernels.packed_weight import NotPackable, PackedWeight

# The library takes inputs and outputs in multiples of this.
_MULTIPLE = 16
_MAX_BLOCK = 4096
_NUMBERS_PER_WARP = 512
_FLOAT8_MAX = tl.constexpr(FLOAT8_MAX)
# Ada, the first generation that multiplies float8.
_MIN_CAPABILITY = (8, 9)


def why_no_scaled_mm(device: torch.device) -> str | None:
    """Returns why `device` cannot multiply 8-bit floats; None if it can."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return "products of float8 require compute capability 8.9 or later"
    return None


@dataclass(frozen=True, slots=True)
class ScaledMmWeight:
    """Weights for products of 8-bit floats. `codes`: [N, K] float8_e4m3fn. `scales`: [1, N]."""

    codes: Tensor
    scales: Tensor

    @property
    def num_outputs(self) -> int:
        """Outputs N."""
        return len(self.codes)

    @property
    def num_bytes(self) -> int:
        """Total bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @classmethod
    def pack(cls, weight: PackedWeight, device: torch.device) -> ScaledMmWeight:
        """Copies `weight` to `device`.

        Raises NotPackable unless its codes are float8_e4m3fn with a scale for each output or for
        all, in order, and N and K are multiples of 16.
        """
        num_outputs, num_inputs = weight.shape
        if num_outputs % _MULTIPLE or num_inputs % _MULTIPLE:
            raise NotPackable(
                f"{num_outputs} outputs and {num_inputs} inputs; allowed: multiples of {_MULTIPLE}"
            )
        plane = weight.planes[0]
        values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        if (
            plane.num_bits != 8
            or weight.values is None
            or not torch.equal(weight.values.cpu().nan_to_num(), values.nan_to_num())
        ):
            raise NotPackable("codes are not float8_e4m3fn")
        if weight.group_size < num_inputs or weight.input_order is not None:
            raise NotPackable("scales are of groups; allowed: of outputs, or one")
        if weight.zero_points is not None or weight.offsets is not None:
            raise NotPackable("weights have offsets; allowed: scales alone")
        scales = weight.scales.as_float32(slice(None)).flatten()
        scales = scales.repeat_interleave(weight.rows_per_group)[:num_outputs]
        return cls(
            codes=plane.bits.to(device).contiguous().view(torch.float8_e4m3fn),
            scales=scales[None, :].to(device).contiguous(),
        )


def joined(weights: Sequence[ScaledMmWeight]) -> ScaledMmWeight:
    """Returns weights with the same inputs as one, outputs one after the other."""
    return ScaledMmWeight(
        codes=torch.cat([each.codes.view(torch.uint8) for each in weights]).view(
            torch.float8_e4m3fn
        ),
        scales=torch.cat([each.scales for each in weights], dim=1),
    )


def scaled_mm_linear(x: Tensor, weight: ScaledMmWeight, bias: Tensor | None = None) -> Tensor:
    """Returns x @ weight.T + bias, [M, N] bfloat16, of activations rounded to 8 bits.

    `x`: [M, K] bfloat16, the numbers of a row contiguous. `bias`: [N] bfloat16.
    """
    if len(x) == 0:
        return x.new_empty(0, len(weight.codes))
    codes, scales = quantize_rows(x)
    product: Tensor = torch._scaled_mm(
        codes,
        weight.codes.T,
        scale_a=scales,
        scale_b=weight.scales,
        bias=bias,
        out_dtype=x.dtype,
    )
    return product


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `x` [M, K] divided by a scale of each row, float8_e4m3fn, and the scales [M, 1].

    A row of zeros has the scale 1. A row that has a number which is not finite becomes NaN.
    """
    num_rows, num_inputs = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(num_rows, num_inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    block = min(_MAX_BLOCK, next_power_of_2(num_inputs))
    if num_rows:
        _quantize_kernel[(num_rows,)](
            x,
            codes,
            scales,
            x.stride(0),
            num_inputs,
            BLOCK=block,
            num_warps=max(1, block // _NUMBERS_PER_WARP),
        )
    return codes, scales


@triton.jit
def _quantize_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    row_stride: tl.tensor,
    num_inputs: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Rounds one row; reads it twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    x += row * row_stride
    codes += row * num_inputs
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_inputs, BLOCK):
        inputs = start + tl.arange(0, BLOCK)
        numbers = tl.load(x + inputs, mask=inputs < num_inputs, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(numbers))
    most = tl.max(largest)
    scale = tl.where(most == 0.0, 1.0, most / _FLOAT8_MAX)
    tl.store(scales + row, scale)
    for start in range(0, num_inputs, BLOCK):
        inputs = start + tl.arange(0, BLOCK)
        mask = inputs < num_inputs
        numbers = tl.load(x + inputs, mask=mask, other=0.0).to(tl.float32)
        store_rounded(codes + inputs, numbers / scale, mask)
