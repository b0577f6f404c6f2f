"""Decodes that share a prefix read it together, and get the bits that each would get alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from splitserve_kernels import reference
from splitserve_kernels.cpu import NativeAttention, NativeLibrary
from splitserve_kernels.paged_batch import AttentionOptions
from tests.kernels.problems import (
    Shape,
    assert_close,
    make_batch,
    make_pools,
    make_tokens,
)

pytestmark = pytest.mark.cases(12)

# Shared tokens: fewer than are read together, some, to the end of a partition, beyond it.
SHARED = (96, 192, 1024, 1536)
# Own tokens of each row before the one that attends; a row with several new tokens among them.
OWN = (1, 17, 48, 130, 5)
NEW = [1, 1, 4, 1, 1]
SHAPE = Shape(6, 2, 64, 64, 16, ())


def _tables(num_shared: int, num_prefixes: int) -> Tensor:
    """Rows take turns at `num_prefixes` prefixes; the rest of their blocks is their own."""
    width, size = num_shared // SHAPE.block_size, SHAPE.block_size
    num_own = -(-(max(OWN) + max(NEW)) // size)
    order = torch.randperm(
        num_prefixes * width + len(OWN) * num_own, generator=torch.Generator().manual_seed(1)
    )
    prefixes = order[: num_prefixes * width].view(num_prefixes, width)
    own = order[num_prefixes * width :].view(len(OWN), num_own)
    return torch.cat([prefixes[torch.arange(len(OWN)) % num_prefixes], own], dim=1)


@pytest.mark.parametrize("num_prefixes", [1, 2])
@pytest.mark.parametrize("num_shared", SHARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 200])
def test_rows_get_the_bits_they_get_alone_when_they_share_blocks(
    library: NativeLibrary,
    dtype: torch.dtype,
    num_shared: int,
    num_prefixes: int,
    window: int | None,
) -> None:
    tables = _tables(num_shared, num_prefixes)
    num_blocks = int(tables.max()) + 1
    options = AttentionOptions(scale=0.2, sliding_window=window)
    everything = make_tokens(SHAPE, num_blocks * SHAPE.block_size, dtype, seed=2)
    every_block = torch.arange(num_blocks)[None]
    whole = make_batch(every_block, [(0, num_blocks * SHAPE.block_size)], SHAPE.block_size)
    rows = [(num_shared + own, new) for own, new in zip(OWN, NEW, strict=True)]
    query = make_tokens(SHAPE, sum(NEW), dtype, seed=3).query
    backend = NativeAttention(library)
    pools = make_pools(SHAPE, num_blocks, dtype)
    backend.write_kv(everything.key, everything.value, *pools, whole)
    batch = make_batch(tables, rows, SHAPE.block_size)
    together = backend.paged_attention(query, *pools, batch, options)

    oracle_pools = make_pools(SHAPE, num_blocks, torch.float32)
    reference.write_kv(everything.key.float(), everything.value.float(), *oracle_pools, whole)
    assert_close(together, reference.paged_attention(query.float(), *oracle_pools, batch, options))
    parts = zip(torch.split(together, NEW), torch.split(query, NEW), strict=True)
    for row, (expected, alone) in enumerate(parts):
        single = make_batch(tables[row : row + 1], rows[row : row + 1], SHAPE.block_size)
        assert torch.equal(backend.paged_attention(alone, *pools, single, options), expected)
