"""Products with quantised weights, against products with dequantised ones in float32.

Shape letters: N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.quantized.gpu_weight import GpuPackedWeight, joined
from splitserve_kernels.gpu.quantized.linear import (
    MAX_NUM_FEW_ROWS,
    dequantized,
    linear_tiles,
    quantized_linear,
)
from splitserve_kernels.gpu.quantized.scaled_mm import (
    ScaledMmWeight,
    quantize_rows,
    scaled_mm_linear,
)
from splitserve_kernels.packed_weight import CodePlane, GroupValues, NotPackable, PackedWeight

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6.0])
CENTRED_4 = torch.arange(16) - 8.0
SIGNED_8 = torch.arange(256, dtype=torch.uint8).view(torch.int8).float()
FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FLOAT8_WIDE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float()
# Entries of a table that no formula makes.
TABLE = torch.linspace(-1, 1, 16).sin()
FLOAT32 = torch.float32


@dataclass(frozen=True)
class Kind:
    """Random weights: bits of each plane, inputs of a group (0: all), numbers of the codes.

    `offset`: "zero_points", "offsets" or "none". `rows`: outputs that share a scale. `super_size`:
    scales that share a super-scale, 0 for none.
    """

    planes: tuple[int, ...]
    group_size: int
    values: Tensor | None = None
    offset: str = "none"
    rows: int = 1
    super_size: int = 0
    shared_scale: float = 1.0
    scale_dtype: torch.dtype = torch.float16

    def weight(self, num_outputs: int, num_inputs: int) -> PackedWeight:
        generator = torch.Generator().manual_seed(num_inputs)
        group_size = self.group_size or num_inputs
        shape = (-(-num_outputs // self.rows), num_inputs // group_size)
        planes = tuple(
            CodePlane(_bytes((num_outputs, num_inputs * bits // 8), generator), bits)
            for bits in self.planes
        )
        if self.values is not None and not bool(self.values.isfinite().all()):
            planes[0].bits[~self.values.isfinite()[planes[0].bits.int()]] = 1
        scales = 0.5 + torch.rand(shape, generator=generator)
        factors = None
        if self.super_size:
            factors = 0.5 + torch.rand(shape[0], shape[1] // self.super_size, generator=generator)
        offsets = torch.randn(shape, generator=generator)
        zero_points = _bytes(shape, generator) & (2 ** sum(self.planes) - 1)
        return PackedWeight(
            planes=planes,
            values=self.values,
            scales=GroupValues(scales.to(self.scale_dtype), factors, self.shared_scale),
            group_size=group_size,
            dtype=torch.bfloat16,
            rows_per_group=self.rows,
            zero_points=zero_points if self.offset == "zero_points" else None,
            offsets=GroupValues(offsets) if self.offset == "offsets" else None,
        )


def _bytes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


KINDS = {
    "gptq": Kind((4,), 128, CENTRED_4),
    "awq": Kind((4,), 64, offset="zero_points"),
    "gptq_3_bits": Kind((2, 1), 32, offset="zero_points"),
    "w8a16_channels": Kind((8,), 0, SIGNED_8, scale_dtype=FLOAT32),
    "w8a16_channels_with_zero_points": Kind((8,), 0, offset="zero_points", scale_dtype=FLOAT32),
    "w8a16_channels_with_offsets": Kind((8,), 0, offset="offsets", scale_dtype=FLOAT32),
    "mxfp4": Kind((4,), 32, E2M1, scale_dtype=torch.float8_e8m0fnu),
    "nvfp4": Kind((4,), 16, E2M1, scale_dtype=torch.float8_e4m3fn, shared_scale=0.37),
    "nf4": Kind((4,), 64, TABLE, scale_dtype=FLOAT32),
    "float8_blocks": Kind((8,), 128, FLOAT8, rows=48, scale_dtype=FLOAT32),
    "float8_tensor": Kind((8,), 0, FLOAT8, rows=99, scale_dtype=FLOAT32),
    "float8_e5m2": Kind((8,), 128, FLOAT8_WIDE),
    "q4_k": Kind((4,), 32, offset="offsets", super_size=2),
    "q6_k": Kind((4, 2), 16, torch.arange(64) - 32.0, super_size=4),
    "q5_0": Kind((4, 1), 32, torch.arange(32) - 16.0),
    "odd_groups": Kind((4,), 48, CENTRED_4),
}
SHAPES = {"odd_groups": (70, 144)}
NAMES = pytest.mark.parametrize("name", KINDS)


def _weight(name: str, num_inputs: int = 384) -> PackedWeight:
    return KINDS[name].weight(*SHAPES.get(name, (99, num_inputs)))


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    return numbers.to(device, dtype)


def _product(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.cpu().double() @ weight.dequantized(FLOAT32).double().T


def _assert_close(product: Tensor, expected: Tensor, tolerance: float) -> None:
    """`tolerance`: of the largest number, too, since products cancel each other."""
    scale = float(expected.abs().max())
    torch.testing.assert_close(
        product.cpu().double(), expected, rtol=tolerance, atol=tolerance * scale
    )


@pytest.mark.cases(5)
@NAMES
def test_quantized_linear_multiplies_with_each_weight_when_rows_select_inputs(
    name: str, device: torch.device
) -> None:
    weight = _weight(name)
    packed = GpuPackedWeight.pack(weight, device)
    selected = torch.eye(weight.shape[1], device=device)
    tiles = linear_tiles(packed, len(selected), FLOAT32, device)
    product = quantized_linear(selected, packed, tiles=tiles).cpu().T
    # Products of code and scale may be rounded once more than in the reference.
    torch.testing.assert_close(product, weight.dequantized(FLOAT32), rtol=3e-7, atol=3e-7)


@NAMES
def test_dequantized_has_each_weight(name: str, device: torch.device) -> None:
    weight = _weight(name)
    numbers = dequantized(GpuPackedWeight.pack(weight, device), FLOAT32).cpu().T
    expected = weight.dequantized(FLOAT32)
    torch.testing.assert_close(numbers[: len(expected)], expected, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("num_rows", [3, MAX_NUM_FEW_ROWS + 1])
@NAMES
def test_quantized_linear_says_what_a_product_in_float32_says(
    name: str, num_rows: int, device: torch.device
) -> None:
    weight = _weight(name)
    x = _random((num_rows, weight.shape[1]), torch.bfloat16, device)
    bias = _random((weight.shape[0],), torch.bfloat16, device)
    product = quantized_linear(x, GpuPackedWeight.pack(weight, device), bias)
    expected = _product(x, weight) + bias.cpu()
    squares = x.cpu().double().square() @ weight.dequantized(FLOAT32).double().square().T
    # Five standard deviations of weights that are rounded to 8 bits, partial sums that cuBLAS
    # rounds, and the rounded result.
    allowed = (5 / 3**0.5 + 1) * 2**-8 * squares.sqrt() + 2**-8 * expected.abs()
    assert product.dtype == torch.bfloat16
    assert bool(((product.cpu() - expected).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_shares", [1, 3])
def test_quantized_linear_adds_shares_when_programs_divide_the_inputs(
    num_shares: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight = KINDS["awq"].weight(70, 640)
    packed = GpuPackedWeight.pack(weight, device)
    x = _random((5, 640), dtype, device)
    tiles = linear_tiles(packed, 5, dtype, device)
    tiles = replace(tiles, num_shares=num_shares, chunks_of_share=-(-3 // num_shares))
    product = quantized_linear(x, packed, _random((70,), FLOAT32, device), tiles=tiles)
    expected = _product(x, weight) + _random((70,), FLOAT32, device).cpu()
    _assert_close(product, expected, 1e-6 if dtype == FLOAT32 else 2**-10)


@pytest.mark.parametrize("num_rows", [4, MAX_NUM_FEW_ROWS + 1])
@pytest.mark.parametrize("num_inputs", [48, 400])
def test_quantized_linear_ends_with_the_inputs_when_they_fill_no_chunk(
    num_inputs: int, num_rows: int, device: torch.device
) -> None:
    """Numbers behind the inputs of a row are not multiplied, not even with 0."""
    weight = KINDS["nvfp4"].weight(40, num_inputs)
    packed = GpuPackedWeight.pack(weight, device)
    x = torch.full((num_rows, num_inputs + 512), torch.nan, device=device)
    x[:, :num_inputs] = _random((num_rows, num_inputs), FLOAT32, device)
    product = quantized_linear(x[:, :num_inputs], packed)
    _assert_close(product, _product(x[:, :num_inputs], weight), 1e-6)


@pytest.mark.parametrize("num_rows", [4, MAX_NUM_FEW_ROWS + 1])
def test_quantized_linear_permutes_inputs_when_they_are_in_activation_order(
    num_rows: int, device: torch.device
) -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    weight = replace(KINDS["gptq"].weight(40, 256), input_order=order)
    packed = GpuPackedWeight.pack(weight, device)
    x = _random((num_rows, 256), FLOAT32, device)
    _assert_close(quantized_linear(x, packed), _product(x, weight), 1e-6)


def test_quantized_linear_has_the_same_bits_when_few_rows_share_the_batch(
    device: torch.device,
) -> None:
    packed = GpuPackedWeight.pack(KINDS["q4_k"].weight(70, 768), device)
    x = _random((9, 768), torch.bfloat16, device)
    alone = quantized_linear(x[4:5], packed)
    for batch in (slice(0, 9), slice(3, 5)):
        assert torch.equal(quantized_linear(x[batch], packed)[4 - batch.start], alone[0])


def test_quantized_linear_reads_rows_in_place_when_they_are_strided(device: torch.device) -> None:
    weight = KINDS["gptq"].weight(40, 256)
    packed = GpuPackedWeight.pack(weight, device)
    x = _random((4, 600), FLOAT32, device)
    expected = quantized_linear(x[:, 100:356].contiguous(), packed)
    assert torch.equal(quantized_linear(x[:, 100:356], packed), expected)
    assert torch.equal(quantized_linear(x[:, 100:356].T.contiguous().T, packed), expected)
    assert quantized_linear(x[:0, :256], packed).shape == (0, 40)
    with pytest.raises(ValueError, match="rows have 600 inputs; allowed: 256"):
        quantized_linear(x, packed)


@pytest.mark.parametrize(
    ("name", "bits_per_weight"),
    [
        ("gptq", 4 + 16 / 128),
        ("mxfp4", 4 + 16 / 32),
        ("nvfp4", 4 + 16 / 16 + 32 / 2048),
        ("q6_k", 8 + 16 / 16),
    ],
)
def test_packed_weight_takes_little_memory_when_scales_are_exact_in_16_bits(
    name: str, bits_per_weight: float, device: torch.device
) -> None:
    weight = KINDS[name].weight(256, 2048)
    weight = replace(weight, scales=replace(weight.scales, super_scales=None))
    packed = GpuPackedWeight.pack(weight, device)
    assert packed.num_bytes * 8 == 256 * 2048 * bits_per_weight


@pytest.mark.parametrize("name", ["awq", "q4_k", "nvfp4", "w8a16_channels", "nf4"])
def test_joined_weights_multiply_as_each_does_when_they_are_of_a_kind(
    name: str, device: torch.device
) -> None:
    weights = [KINDS[name].weight(size, 256) for size in (128, 64, 70)]
    if KINDS[name].shared_scale != 1.0:
        weights[1] = replace(weights[1], scales=replace(weights[1].scales, shared_scale=0.2))
    packed = [GpuPackedWeight.pack(weight, device) for weight in weights]
    together = joined(packed)
    assert together is not None
    x = _random((3, 256), torch.bfloat16, device)
    expected = torch.cat([quantized_linear(x, each) for each in packed], dim=1)
    torch.testing.assert_close(quantized_linear(x, together), expected, rtol=2**-7, atol=0.1)


def test_joined_returns_none_when_one_product_cannot_take_the_weights(
    device: torch.device,
) -> None:
    gptq, awq = (
        GpuPackedWeight.pack(KINDS[name].weight(64, 256), device) for name in ("gptq", "awq")
    )
    padded = GpuPackedWeight.pack(KINDS["gptq"].weight(70, 256), device)
    assert joined([gptq]) is gptq
    assert joined([gptq, padded]) is not None
    assert joined([padded, gptq]) is None
    assert joined([gptq, awq]) is None
    nf4 = [GpuPackedWeight.pack(KINDS["nf4"].weight(64, 256), device) for _ in range(2)]
    nf4[1] = replace(nf4[1], numbers=nf4[1].numbers._replace(table=-TABLE.to(device)))
    assert joined(nf4) is None


def test_pack_names_the_reason_when_a_weight_does_not_fit(device: torch.device) -> None:
    weight = KINDS["gptq"].weight(16, 240)
    with pytest.raises(NotPackable, match=r"groups have 24 inputs; allowed: multiples of 16"):
        GpuPackedWeight.pack(replace(weight, group_size=24), device)
    weight = KINDS["float8_blocks"].weight(48, 256)
    weight.planes[0].bits[5, 7] = 0xFF
    with pytest.raises(NotPackable, match="a weight is not finite"):
        GpuPackedWeight.pack(weight, device)


# -- Products of 8-bit floats ----------------------------------------------------------------------

SCALED_MM_KINDS = {
    "tensor": Kind((8,), 0, FLOAT8, rows=48, scale_dtype=FLOAT32),
    "outputs": Kind((8,), 0, FLOAT8, scale_dtype=FLOAT32),
}


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("name", SCALED_MM_KINDS)
def test_scaled_mm_linear_rounds_each_row_by_its_largest_number(
    name: str, num_rows: int, device: torch.device
) -> None:
    weight = SCALED_MM_KINDS[name].weight(48, 160)
    x = _random((num_rows, 160), torch.bfloat16, device)
    x *= torch.arange(1, num_rows + 1, device=device)[:, None] ** 4
    bias = _random((48,), torch.bfloat16, device)
    product = scaled_mm_linear(x, ScaledMmWeight.pack(weight, device), bias)
    scales = x.float().abs().amax(dim=1, keepdim=True) / 448
    rounded = (x.float() / scales).to(torch.float8_e4m3fn).float() * scales
    expected = _product(rounded, weight) + bias.cpu()
    # The bias may be added to a result that is rounded already.
    allowed = 2**-8 * (expected.abs() + bias.cpu().abs()) + 1e-3 * expected.abs().amax()
    assert product.dtype == torch.bfloat16
    assert bool(((product.cpu() - expected).abs() <= allowed).all())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_quantize_rows_keeps_errors_within_their_row(device: torch.device) -> None:
    x = torch.ones(5, 40, dtype=torch.bfloat16, device=device)
    x[1, 3], x[2, 3], x[3] = torch.nan, torch.inf, 0.0
    x[4] = torch.arange(40) - 39
    codes, scales = (each.cpu().float() for each in quantize_rows(x))
    assert codes[0].tolist() == [448.0] * 40
    assert codes[1, 3].isnan()
    assert codes[2, 3].isnan()
    assert codes[3].tolist() == [0.0] * 40
    assert scales[3] == 1.0
    assert codes[4, 0] == -448.0
    torch.testing.assert_close(codes[4] * scales[4], torch.arange(40) - 39.0, rtol=2**-4, atol=0)


def test_scaled_mm_pack_names_the_reason_when_a_weight_does_not_fit(device: torch.device) -> None:
    kind = SCALED_MM_KINDS["outputs"]
    with pytest.raises(NotPackable, match="40 outputs and 32 inputs; allowed: multiples of 16"):
        ScaledMmWeight.pack(kind.weight(40, 32), device)
    with pytest.raises(NotPackable, match="codes are not float8_e4m3fn"):
        ScaledMmWeight.pack(replace(kind, values=SIGNED_8).weight(16, 32), device)
    with pytest.raises(NotPackable, match="scales are of groups"):
        ScaledMmWeight.pack(replace(kind, group_size=16).weight(16, 32), device)
