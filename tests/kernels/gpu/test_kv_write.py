"""Writes to the cache against plain torch, with and without rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from splitserve_kernels.gpu.launch import FLOAT8_MAX, LayerPools
from splitserve_kernels.paged_batch import KVScales

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.kv_write import kv_write, rotary_kv_write
from splitserve_kernels.gpu.launch import RotaryTables

pytestmark = pytest.mark.cases(6)

FLOAT8 = torch.float8_e4m3fn
NUM_TOKENS, NUM_BLOCKS = 7, 5
# Rounding of float32 products and sums, in units of the result: the last bit of each dtype.
LAST_BIT = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7, FLOAT8: 2**-3}


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int


SHAPES = (
    Shape(1, 1, 32, 32, 1),
    Shape(8, 2, 64, 64, 8),
    Shape(6, 3, 80, 48, 16),
    Shape(16, 16, 96, 96, 32),
    Shape(4, 1, 256, 256, 256),
)


def _pools(shape: Shape, dtype: torch.dtype, device: torch.device, scales: KVScales) -> LayerPools:
    """Twos, with other layers around keys and values."""
    tokens = shape.block_size * shape.num_kv_heads
    sizes = [tokens * shape.key_dim, 32, tokens * shape.value_dim, 16]
    pool = torch.full((NUM_BLOCKS, sum(sizes)), 2.0).to(dtype).to(device)
    key, _, value, _ = torch.split(pool, sizes, dim=1)
    heads = (NUM_BLOCKS, shape.block_size, shape.num_kv_heads)
    return LayerPools(key.view(*heads, shape.key_dim), value.view(*heads, shape.value_dim), scales)


def _heads(num_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[NUM_TOKENS, num_heads, dim], the heads of all tokens next to each other."""
    generator = torch.Generator().manual_seed(num_heads + dim)
    numbers = torch.randn(num_heads, NUM_TOKENS, dim, generator=generator) * 3
    return numbers.to(dtype).to(device).transpose(0, 1)


def _slots(shape: Shape, device: torch.device) -> Tensor:
    """Distinct; the last token has none."""
    generator = torch.Generator().manual_seed(1)
    num_slots = NUM_BLOCKS * shape.block_size
    slots = torch.randperm(num_slots, generator=generator)[:NUM_TOKENS]
    slots = torch.cat([slots, torch.full((NUM_TOKENS - len(slots),), -1)])
    slots[-1] = -1
    return slots.to(device)


def _written(pool: Tensor, numbers: Tensor, slots: Tensor, scale: float) -> Tensor:
    """What `pool` should be."""
    numbers = numbers.float() * (1.0 / scale)
    if pool.dtype == FLOAT8:
        numbers = numbers.clamp(-FLOAT8_MAX, FLOAT8_MAX)
    expected = pool.clone()
    flat = expected.flatten(0, 1)
    has_slot = slots >= 0
    # torch has no scatter for float8: copy its bits.
    width = torch.uint8 if pool.dtype == FLOAT8 else pool.dtype
    flat.view(width)[slots[has_slot]] = numbers.to(pool.dtype).view(width)[has_slot]
    return expected


def _assert_equals(actual: Tensor, expected: Tensor) -> None:
    """To the last bit."""
    rtol = LAST_BIT[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=1e-5, rtol=rtol)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, FLOAT8),
    ],
)
def test_kv_write_fills_slots_and_nothing_else_when_shapes_are_odd(
    shape: Shape, dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device
) -> None:
    scales = KVScales(key=0.5, value=0.25) if pool_dtype == FLOAT8 else KVScales()
    pools, slots = _pools(shape, pool_dtype, device, scales), _slots(shape, device)
    key = _heads(shape.num_kv_heads, shape.key_dim, dtype, device)
    value = _heads(shape.num_kv_heads, shape.value_dim, dtype, device)
    expected_key = _written(pools.key, key, slots, scales.key)
    expected_value = _written(pools.value, value, slots, scales.value)
    kv_write(key, value, pools, slots)
    # Scales are powers of two, so that there is one rounding only.
    assert torch.equal(pools.key.float(), expected_key.float())
    assert torch.equal(pools.value.float(), expected_value.float())


def test_kv_write_saturates_when_numbers_exceed_float8(
    device: torch.device,
) -> None:
    shape = Shape(1, 1, 8, 8, 16)
    pools = _pools(shape, FLOAT8, device, KVScales())
    key = torch.tensor([448.0, 449.0, 1e9, -1e9, torch.inf, -torch.inf, torch.nan, 0.0])
    key = key.view(1, 1, 8).to(device)
    kv_write(key, key, pools, torch.tensor([3], device=device))
    expected = torch.tensor([448.0, 448, 448, -448, 448, -448, torch.nan, 0], device=device)
    for pool in (pools.key, pools.value):
        torch.testing.assert_close(pool[0, 3, 0].float(), expected, equal_nan=True)


def test_kv_write_copies_when_heads_are_not_dense(device: torch.device) -> None:
    shape = SHAPES[1]
    pools, slots = _pools(shape, torch.float32, device, KVScales()), _slots(shape, device)
    numbers = torch.randn(NUM_TOKENS, shape.key_dim, 2, device=device).transpose(1, 2)
    expected = _written(pools.key, numbers, slots, 1.0)
    kv_write(numbers, numbers, pools, slots)
    assert torch.equal(pools.key, expected)


def test_kv_write_does_nothing_when_there_are_no_tokens(device: torch.device) -> None:
    pools = _pools(SHAPES[1], torch.float32, device, KVScales())
    none = torch.empty(0, 2, 64, device=device)
    kv_write(none, none, pools, torch.empty(0, dtype=torch.int64, device=device))
    assert bool((pools.key == 2).all())


def test_layer_pools_refuse_blocks_when_they_have_gaps() -> None:
    pool = torch.zeros(4, 16, 2, 32)
    with pytest.raises(ValueError, match=r"value pool of shape .* must be contiguous"):
        LayerPools(pool, pool[:, :, :1])


def _turned(numbers: Tensor, rotary: RotaryTables) -> Tensor:
    """Float32; as Hugging Face's Llama puts it: x cos + rotate_half(x) sin."""
    half = rotary.cosine.shape[1]
    turning, rest = numbers.float()[..., : 2 * half], numbers.float()[..., 2 * half :]
    cosine = torch.cat([rotary.cosine, rotary.cosine], dim=-1)[:, None]
    sine = torch.cat([rotary.sine, rotary.sine], dim=-1)[:, None]
    rotated_half = torch.cat([-turning[..., half:], turning[..., :half]], dim=-1)
    return torch.cat([turning * cosine + rotated_half * sine, rest], dim=-1)


@pytest.mark.cases(12)
@pytest.mark.parametrize(
    ("shape", "part", "dtype", "pool_dtype"),
    [
        *(
            (shape, part, torch.float32, torch.float32)
            for shape in SHAPES
            for part in (1, 0.5, 0.25)
        ),
        # Rounded once.
        (SHAPES[2], 0.5, torch.bfloat16, torch.bfloat16),
        (SHAPES[2], 0.5, torch.float16, torch.float32),
        (SHAPES[2], 0.5, torch.bfloat16, FLOAT8),
    ],
)
def test_rotary_kv_write_turns_query_and_key(
    shape: Shape, part: float, dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device
) -> None:
    half = int(shape.key_dim * part) // 2
    angles = torch.randn(NUM_TOKENS, half, generator=torch.Generator().manual_seed(2)) * 9
    rotary = RotaryTables(angles.cos().to(device), angles.sin().to(device))
    scales = KVScales(key=0.5, value=2.0)
    pools, slots = _pools(shape, pool_dtype, device, scales), _slots(shape, device)
    query = _heads(shape.num_heads, shape.key_dim, dtype, device)
    key = _heads(shape.num_kv_heads, shape.key_dim, dtype, device)
    value = _heads(shape.num_kv_heads, shape.value_dim, dtype, device)
    expected_key = _written(pools.key, _turned(key, rotary), slots, scales.key)
    expected_value = _written(pools.value, value, slots, scales.value)
    actual = rotary_kv_write((query, key, value), rotary, pools, slots)
    _assert_equals(actual, _turned(query, rotary).to(dtype))
    _assert_equals(pools.key, expected_key)
    assert torch.equal(pools.value.float(), expected_value.float())


def test_rotary_kv_write_returns_nothing_when_there_are_no_tokens(device: torch.device) -> None:
    pools = _pools(SHAPES[1], torch.float32, device, KVScales())
    none, table = torch.empty(0, 2, 64, device=device), torch.empty(0, 32, device=device)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    output = rotary_kv_write((none, none, none), RotaryTables(table, table), pools, slots)
    assert output.shape == (0, 2, 64)
