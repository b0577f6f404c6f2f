"""Norms, and the addition before them, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.layer_ops import add_rms_norm, rms_norm

EPSILON = 1e-5
# The last bit of each dtype: sums are in another order, and a root is approximated.
LAST_BIT = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
SHAPES = ((1, 1), (3, 42), (2, 64), (5, 300), (2, 5000), (3, 6, 16), (2, 5, 10), (2, 40, 128))


def _random(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator)).to(dtype).to(device)


def _normed(numbers: Tensor, weight: Tensor) -> Tensor:
    return weight * functional.rms_norm(numbers, numbers.shape[-1:], eps=EPSILON)


@pytest.mark.parametrize("dtype", LAST_BIT)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_says_what_torch_says_when_shapes_are_odd(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    numbers, addend = (_random(shape, seed, dtype, device) for seed in (0, 1))
    weight = _random(shape[1:], 2, dtype, device)
    total, normed = add_rms_norm(numbers, addend, weight, EPSILON)
    assert torch.equal(total, numbers + addend)
    # Rounded twice behind the sum, so it may be two of the last bits.
    expected = _normed(numbers + addend, weight)
    torch.testing.assert_close(normed, expected, rtol=2 * LAST_BIT[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", LAST_BIT)
def test_rms_norm_reads_heads_in_place_when_others_lie_behind_them(
    dtype: torch.dtype, device: torch.device
) -> None:
    heads = _random((4, 9, 20), 3, dtype, device)
    before = heads.clone()
    weight = _random((6, 20), 4, dtype, device)
    normed = rms_norm(heads[:, :6], weight, EPSILON)
    expected = _normed(before[:, :6], weight)
    torch.testing.assert_close(normed, expected, rtol=2 * LAST_BIT[dtype], atol=1e-6)
    assert normed.is_contiguous()
    assert torch.equal(heads, before)


def test_rms_norm_stays_finite_when_all_numbers_are_zero(device: torch.device) -> None:
    numbers = torch.zeros(2, 33, device=device)
    assert torch.equal(rms_norm(numbers, torch.ones(33, device=device), EPSILON), numbers)


def test_rms_norm_returns_nothing_when_there_are_no_tokens(device: torch.device) -> None:
    none, weight = torch.empty(0, 8, device=device), torch.ones(8, device=device)
    assert rms_norm(none, weight, EPSILON).shape == (0, 8)
    total, normed = add_rms_norm(none, none, weight, EPSILON)
    assert total.shape == normed.shape == (0, 8)
