"""Linear layers with packed weights on GPUs, and what serves where a kernel does not."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("triton", reason="triton is not installed")

from executor_service.decoders import GpuLinears, GpuQuantizedLinear
from splitserve_kernels.gpu.quantized import linear
from splitserve_kernels.packed_weight import CodePlane, GroupValues, PackedWeight

FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _weight(group_size: int = 32) -> PackedWeight:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (64, 64), dtype=torch.uint8, generator=generator)
    return PackedWeight(
        planes=(CodePlane(codes, 4),),
        values=torch.arange(16) - 8.0,
        scales=GroupValues(torch.rand(64, 128 // group_size, generator=generator)),
        group_size=group_size,
        dtype=torch.bfloat16,
    )


def _rows(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 128, generator=generator).to(device, torch.bfloat16)


def _expected(weight: PackedWeight, rows: Tensor, bias: Tensor) -> Tensor:
    product = functional.linear(rows.cpu().float(), weight.dequantized(torch.float32))
    return product + bias.float()


def test_layer_multiplies_with_packed_weights_when_the_trial_passes(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    weight, bias, rows = _weight(), torch.arange(64.0), _rows(device)
    layer = GpuLinears(device, torch.bfloat16).layer([weight], bias)
    assert isinstance(layer, GpuQuantizedLinear)
    expected = _expected(weight, rows, bias)
    torch.testing.assert_close(layer(rows).cpu().float(), expected, rtol=2**-7, atol=0.5)
    assert layer.num_bytes < 2 * 64 * 128
    assert caplog.records == []


def test_layer_has_dequantised_weights_when_groups_are_too_small(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    weight, bias, rows = _weight(group_size=8), torch.arange(64.0), _rows(device)
    linears = GpuLinears(device, torch.bfloat16)
    with caplog.at_level(logging.INFO):
        layer = [linears.layer([weight], bias) for _ in range(2)][1]
    assert isinstance(layer, nn.Linear)
    expected = _expected(weight, rows, bias)
    torch.testing.assert_close(layer(rows).cpu().float(), expected, rtol=2**-7, atol=0.5)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"packed_layers_refused device={device.type} reason='groups have 8 inputs; allowed:"
        " multiples of 16, or all inputs': using dequantised weights"
    )


@pytest.mark.parametrize(
    "fault", ["one weight", "few rows", "NaN", "an exception"], ids=lambda fault: fault
)
def test_layer_has_dequantised_weights_when_the_kernel_is_wrong(
    fault: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    multiply = linear.quantized_linear

    def wrong(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:  # noqa: ANN401
        if fault == "an exception":
            raise RuntimeError("out of resources")
        product = multiply(x, weight, bias)
        if fault == "one weight":
            product[:, 5] += x[:, 7]
        elif fault == "few rows" and len(x) < 64:
            product[-1] = 0.0
        elif fault == "NaN":
            product[0, 0] = torch.nan
        return product

    monkeypatch.setattr(linear, "quantized_linear", wrong)
    linears = GpuLinears(device, torch.bfloat16)
    layers = [linears.layer([_weight()]) for _ in range(3)]
    assert [type(layer) for layer in layers] == [nn.Linear] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("group_sizes", [(32, 32, 32), (32, 64, 32), (32, 8, 32)])
def test_layer_has_the_outputs_of_all_weights_when_there_are_several(
    group_sizes: tuple[int, ...], device: torch.device
) -> None:
    """Of one kind, of several, and where one of them is not packed."""
    weights = [_weight(size) for size in group_sizes]
    bias, rows = torch.arange(3 * 64.0), _rows(device)
    product = GpuLinears(device, torch.bfloat16).layer(weights, bias)(rows)
    parts = zip(weights, torch.split(bias, 64), strict=True)
    expected = torch.cat([_expected(weight, rows, part) for weight, part in parts], dim=-1)
    torch.testing.assert_close(product.cpu().float(), expected, rtol=2**-7, atol=0.5)


@pytest.mark.parametrize("has_float8_inputs", [False, True])
def test_layer_rounds_rows_when_the_checkpoint_was_made_for_float8_inputs(
    has_float8_inputs: bool, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(100, (64, 128), dtype=torch.uint8, generator=generator)
    weight = replace(
        _weight(),
        planes=(CodePlane(codes, 8),),
        values=FLOAT8,
        scales=GroupValues(torch.rand(64, 1, generator=generator)),
        group_size=128,
        has_float8_inputs=has_float8_inputs,
    )
    layer = GpuLinears(device, torch.bfloat16).layer([weight])
    assert isinstance(layer, GpuQuantizedLinear)
    assert caplog.records == []
    rows, scale = _rows(device), 448 / 5
    rounded = (rows * scale).to(torch.float8_e4m3fn).to(torch.bfloat16) / scale
    exact = _expected(weight, rows, torch.zeros(64))
    error = float((layer(rows).cpu().float() - exact).norm() / exact.norm())
    typical = float((_expected(weight, rounded, torch.zeros(64)) - exact).norm() / exact.norm())
    assert error < 2 * typical
    assert (error > typical / 4) == has_float8_inputs
    two = GpuLinears(device, torch.bfloat16).layer([weight, weight])
    assert torch.equal(two(rows), torch.cat([layer(rows)] * 2, dim=-1))
