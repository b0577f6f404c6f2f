"""Products with quantised weights: are they right, and how fast beside plain ones of cuBLAS?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import median_s, recorded
from executor_service.decoders import GpuLinears, GpuQuantizedLinear
from splitserve_kernels.gpu.launch import why_unavailable
from splitserve_kernels.packed_weight import CodePlane, GroupValues, PackedWeight

# Outputs and inputs of an 8B Llama's gates.
_NUM_OUTPUTS, _NUM_INPUTS = 14336, 4096
# More than the cache of an H200 holds.
_NUM_COPIES = 4
_ROWS = (1, 8, 16, 64, 65, 512, 2048)
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6.0])
_FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True, slots=True)
class _Format:
    """Codes of `num_bits`; `group_size` 0: a scale of each output. `has_float8_inputs`: rows."""

    num_bits: int
    group_size: int
    values: Tensor | None = None
    has_zero_points: bool = False
    has_offsets: bool = False
    has_float8_inputs: bool = False

    def weight(self, num_outputs: int, num_inputs: int) -> PackedWeight:
        """Random, all numbers finite."""
        generator = torch.Generator().manual_seed(0)
        num_bytes = num_inputs * self.num_bits // 8
        codes = torch.randint(120, (num_outputs, num_bytes), dtype=torch.uint8, generator=generator)
        groups = (num_outputs, num_inputs // (self.group_size or num_inputs))
        scales = 0.5 + torch.rand(groups, generator=generator)
        zero_points = torch.randint(16, groups, dtype=torch.uint8, generator=generator)
        return PackedWeight(
            planes=(CodePlane(codes, self.num_bits),),
            values=self.values,
            scales=GroupValues(scales if self.has_offsets else scales.bfloat16()),
            group_size=self.group_size or num_inputs,
            dtype=torch.bfloat16,
            zero_points=zero_points if self.has_zero_points else None,
            offsets=GroupValues(scales) if self.has_offsets else None,
            has_float8_inputs=self.has_float8_inputs,
        )


_FORMATS = {
    "4 bits, zero points of 128": _Format(4, 128, has_zero_points=True),
    "4 bits, offsets of 32": _Format(4, 32, has_offsets=True),
    "4 bits of a table of 64": _Format(4, 64, torch.linspace(-1, 1, 16).sin()),
    "MXFP4": _Format(4, 32, _E2M1),
    "NVFP4": _Format(4, 16, _E2M1),
    "8 bits": _Format(8, 0, torch.arange(256) - 128.0),
    "float8 of 128": _Format(8, 128, _FLOAT8),
    "float8, rounded rows": _Format(8, 0, _FLOAT8, has_float8_inputs=True),
}


def cases(sizes: Sizes) -> Iterator[Case]:
    """Of each format: its trial, and its times."""
    if why_unavailable() is None:
        for name, each in list(_FORMATS.items())[:2] if sizes.is_smoke else _FORMATS.items():
            yield Case(name, 15, partial(_measure, name, each, sizes))


def _measure(name: str, each: _Format, sizes: Sizes) -> Iterator[Measurement]:
    shape = (_NUM_OUTPUTS // sizes.divisor, max(128, _NUM_INPUTS // sizes.divisor))
    weight = each.weight(*shape)
    linears = GpuLinears(sizes.device, torch.bfloat16)
    layers = [linears.layer([weight]) for _ in range(1 if sizes.is_smoke else _NUM_COPIES)]
    is_packed = isinstance(layers[0], GpuQuantizedLinear)
    yield Measurement(f"{name}: trial", "passed" if is_packed else "refused", is_met=is_packed)
    dense = weight.dequantized().to(sizes.device)
    plain = [partial(functional.linear, weight=dense.clone()) for _ in layers]
    for num_rows in _ROWS[:1] if sizes.is_smoke else _ROWS:
        rows = torch.ones(num_rows, shape[1], dtype=torch.bfloat16, device=sizes.device)
        packed_s, plain_s = _seconds(layers, rows, sizes), _seconds(plain, rows, sizes)
        note = f"{packed_s * 1e6:.1f} us, plain {plain_s * 1e6:.1f} us"
        yield Measurement(
            f"{name}: {num_rows} rows", plain_s / packed_s, "times as fast as plain", note=note
        )


def _seconds(layers: Sequence[Callable[[Tensor], Tensor]], rows: Tensor, sizes: Sizes) -> float:
    """Of one layer."""

    def run() -> None:
        for layer in layers:
            layer(rows)

    run()  # compiles
    return median_s(recorded(run, sizes.device), sizes.device, sizes.num_runs) / len(layers)
