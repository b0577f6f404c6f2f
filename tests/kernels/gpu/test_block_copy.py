"""Copies of blocks against indexing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.kv_write import copy_blocks

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
