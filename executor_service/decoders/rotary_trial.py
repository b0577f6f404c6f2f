"""Tries a kernel that turns heads and writes keys and values, against plain torch.

Shape letters: T tokens, H query heads, G key/value heads, D head size, R turned dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from executor_service.decoders.llama_parts import rotation
from executor_service.device.kv_cache import KVCache
from executor_service.errors import TrialFailed, one_line
from executor_service.model.loaded_model import LoadedModel, layer_kinds
from splitserve_kernels.gpu.layer_pools import LayerPools
from splitserve_kernels.gpu.rotary_kv_write import RotaryTables
from splitserve_kernels.paged_batch import UNIT_SCALES, KVScales

# See `splitserve_kernels.gpu.rotary_kv_write`: heads, tables, pools, slots -> turned query.
RotaryWrite = Callable[[tuple[Tensor, Tensor, Tensor], RotaryTables, LayerPools, Tensor], Tensor]

_NUM_TOKENS = 37
# The last bit, relative to the number: sums of two products may be rounded in between or not.
_LAST_BITS = {
    torch.float32: 2.0**-20,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.float8_e4m3fn: 2.0**-3,
}
_ABSOLUTE_TOLERANCE = 1e-5


@torch.inference_mode()
def try_rotary_write(write: RotaryWrite, loaded: LoadedModel, block_size: int) -> None:
    """Compares what `write` returns and stores, on random heads as the layers of `loaded` have.

    Raises TrialFailed, also if `write` raises something.
    """
    try:
        for name, error in _excesses(write, loaded, block_size).items():
            if not error <= _ABSOLUTE_TOLERANCE:
                raise TrialFailed(
                    f"turning and writing heads: the {name} differs by {error:.2g} more than its"
                    f" last bit, in {loaded.dtype} over {loaded.kv_dtype}"
                )
    except TrialFailed:
        raise
    except Exception as error_raised:
        reason = f"{type(error_raised).__name__}: {one_line(error_raised)}"
        raise TrialFailed(f"turning and writing heads: {reason}") from error_raised


def _excesses(write: RotaryWrite, loaded: LoadedModel, block_size: int) -> dict[str, float]:
    """By how much more than their last bit numbers are off."""
    device, kind = loaded.device, layer_kinds(loaded)[0]
    num_heads, num_kv_heads = kind.num_heads, kind.layer.num_kv_heads
    generator = torch.Generator().manual_seed(0)
    # Next to each other, as one product makes them.
    shape = (_NUM_TOKENS, num_heads + 2 * num_kv_heads, kind.layer.key_dim)
    heads = (3 * torch.randn(shape, generator=generator)).to(device, loaded.dtype)
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    half = rotation(loaded, 0, 1)[0].shape[1]
    angles = (9 * torch.randn(_NUM_TOKENS, half, generator=generator)).to(device)

    num_blocks = -(-_NUM_TOKENS // block_size) + 1
    cache = KVCache([kind.layer], block_size, num_blocks, 0, loaded.kv_dtype, device)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:_NUM_TOKENS].to(device)
    slots[-1] = -1  # not to be written
    is_scaled = loaded.kv_dtype.itemsize == 1
    scales = KVScales(key=0.07, value=0.04) if is_scaled else UNIT_SCALES
    pools = LayerPools(cache.key_pools[0], cache.value_pools[0], scales)
    rotary = RotaryTables(angles.cos(), angles.sin())
    turned_query = write((query, key, value), rotary, pools, slots)
    return {
        "query": _excess(turned_query, _turned(query, rotary), loaded.dtype),
        "key": _pool_excess(pools.key, _turned(key, rotary) / scales.key, slots),
        "value": _pool_excess(pools.value, value.float() / scales.value, slots),
    }


def _turned(heads: Tensor, rotary: RotaryTables) -> Tensor:
    """[T, .., D] -> the same in float32, the first R dimensions turned."""
    half = rotary.cosine.shape[1]
    x, y, rest = torch.split(heads.float(), [half, half, heads.shape[-1] - 2 * half], dim=-1)
    cosine, sine = rotary.cosine[:, None], rotary.sine[:, None]
    return torch.cat([x * cosine - y * sine, y * cosine + x * sine, rest], dim=-1)


def _pool_excess(pool: Tensor, written: Tensor, slots: Tensor) -> float:
    """`written`: [T, G, D] float32. What has no slot is not written, and all else is 0."""
    # Float8 has no indexing.
    expected = torch.zeros(pool.shape, device=pool.device).flatten(0, 1)
    expected[slots[slots >= 0]] = written[slots >= 0]
    return _excess(pool.float().flatten(0, 1), expected, pool.dtype)


def _excess(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """`expected` is float32, and rounded to `dtype` first. NaN if there is one."""
    rounded = expected.to(dtype).float()
    return float(((actual.float() - rounded).abs() - _LAST_BITS[dtype] * rounded.abs()).max())
