"""Norms, gated products and copies of blocks, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.kv_write import copy_blocks
from splitserve_kernels.gpu.layer_ops import add_rms_norm, gated_product, rms_norm

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


# The last bit of each dtype, twice: exp is approximated, and there are two roundings.
GATED_TOLERANCES = {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("dtype", GATED_TOLERANCES)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 97), (2, 1024), (2, 2500)])
def test_gated_product_says_what_torch_says_when_widths_are_odd(
    num_tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = 4 * torch.randn(num_tokens, 2 * width, generator=generator)
    gate_up = numbers.to(device, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    product = gated_product(gate_up)
    assert product.dtype == dtype
    expected = functional.silu(gate) * up
    torch.testing.assert_close(product, expected, rtol=GATED_TOLERANCES[dtype], atol=1e-6)


def test_gated_product_is_zero_when_the_gate_is_far_below(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 3.0, 3.0, 3.0]], device=device)
    assert gated_product(gate_up).tolist() == [[0.0, 0.0, 600.0]]


def test_gated_product_returns_nothing_when_there_are_no_tokens(device: torch.device) -> None:
    assert gated_product(torch.empty(0, 8, device=device)).shape == (0, 4)


NUM_BLOCKS = 9
# One tile of a kernel has 4096 numbers.
SIZES = (1, 37, 4096, 9001)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)


def _pool(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[NUM_BLOCKS, size] random bits, of a wider tensor."""
    generator = torch.Generator().manual_seed(size)
    num_bytes = (size + 3) * dtype.itemsize
    bits = torch.randint(256, (NUM_BLOCKS, num_bytes), dtype=torch.uint8, generator=generator)
    return bits.to(device).view(dtype)[:, :size]


def _ids(*block_ids: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(block_ids, dtype=dtype, device=device)


def _bits(tensor: Tensor) -> Tensor:
    """NaN equals itself as bits."""
    return tensor.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_copy_blocks_changes_destinations_alone_when_one_source_feeds_two(
    size: int, dtype: torch.dtype, id_dtype: torch.dtype, device: torch.device
) -> None:
    pool = _pool(size, dtype, device)
    before = _bits(pool)
    sources = _ids(0, 0, 8, device=device, dtype=id_dtype)
    copy_blocks(pool, sources, _ids(3, 4, 1, device=device, dtype=id_dtype))
    assert torch.equal(_bits(pool), before[[0, 8, 2, 0, 0, 5, 6, 7, 8]])


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_copy_blocks_changes_nothing_when_there_are_no_blocks(
    id_dtype: torch.dtype, device: torch.device
) -> None:
    pool = _pool(37, torch.bfloat16, device)
    before = _bits(pool)
    none = _ids(device=device, dtype=id_dtype)
    copy_blocks(pool, none, none)
    assert torch.equal(_bits(pool), before)
