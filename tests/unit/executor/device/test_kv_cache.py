from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_service.device.kv_cache import Bytes, KVCache, LayerShape, block_bytes
from executor_service.errors import OutOfMemory
from executor_service.steps.step import BlockMoves

# Layers of unequal shape, as some models have them.
LAYERS = (LayerShape(2, 4, 4), LayerShape(1, 3, 5))
BLOCK_SIZE = 3
NUM_BLOCKS = 6


def _moves(*pairs: tuple[int, int]) -> BlockMoves:
    columns = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    return BlockMoves(columns[:, 0].copy(), columns[:, 1].copy())


@pytest.fixture
def cache() -> KVCache:
    """Every number of device block b is 1000 b + something below 1000."""
    cache = KVCache(LAYERS, BLOCK_SIZE, NUM_BLOCKS, 4, torch.float32, torch.device("cpu"))
    for pool in (*cache.key_pools, *cache.value_pools):
        for block in range(NUM_BLOCKS):
            content = torch.arange(pool[block].numel()) + 1000 * block
            pool[block] = content.view(pool[block].shape)
    return cache


def _owners(cache: KVCache) -> list[list[int]]:
    """For each device block, whose content each layer's keys and values hold."""
    owners: list[list[int]] = []
    for block in range(NUM_BLOCKS):
        found = set()
        for pool in (*cache.key_pools, *cache.value_pools):
            found |= set((pool[block] // 1000).to(torch.int64).flatten().tolist())
        owners.append(sorted(found))
    return owners


def test_block_bytes_counts_keys_and_values_when_layers_differ() -> None:
    assert block_bytes(LAYERS, BLOCK_SIZE, torch.bfloat16) == 3 * 2 * (2 * 8 + 1 * 8)


def test_cache_views_have_layer_shapes_when_layers_differ(cache: KVCache) -> None:
    assert [pool.shape[1:] for pool in cache.key_pools] == [(3, 2, 4), (3, 1, 3)]
    assert [pool.shape[1:] for pool in cache.value_pools] == [(3, 2, 4), (3, 1, 5)]
    assert cache.block_bytes == block_bytes(LAYERS, BLOCK_SIZE, torch.float32)


def test_cache_blocks_do_not_overlap_when_all_are_filled(cache: KVCache) -> None:
    assert _owners(cache) == [[block] for block in range(NUM_BLOCKS)]


def test_cache_layers_do_not_overlap_when_each_is_filled_in_turn(cache: KVCache) -> None:
    pools = [*cache.key_pools, *cache.value_pools]
    for number, pool in enumerate(pools):
        pool[:] = number
    assert [set(pool.flatten().tolist()) for pool in pools] == [{0}, {1}, {2}, {3}]


def test_copy_moves_all_layers_when_one_source_feeds_two(cache: KVCache) -> None:
    cache.copy(_moves((0, 3), (0, 4), (2, 5)))
    assert _owners(cache) == [[0], [1], [2], [0], [0], [2]]


def test_copy_reads_before_it_writes_when_blocks_trade_places(cache: KVCache) -> None:
    cache.copy(_moves((0, 1), (1, 2), (2, 0)))
    assert _owners(cache)[:3] == [[2], [0], [1]]


def test_swap_restores_blocks_when_they_come_back_elsewhere(cache: KVCache) -> None:
    cache.swap_out(_moves((5, 0), (1, 3)))
    cache.copy(_moves((0, 5), (2, 1)))
    cache.swap_in(_moves((0, 4), (3, 3)))
    assert _owners(cache) == [[0], [2], [2], [1], [5], [0]]


def test_swap_moves_every_block_when_ids_follow_each_other_or_not(cache: KVCache) -> None:
    cache.swap_out(_moves((3, 0), (4, 1), (5, 3), (3, 2)))
    cache.swap_in(_moves((3, 0), (1, 1), (2, 2), (0, 5)))
    assert _owners(cache) == [[5], [4], [3], [3], [4], [3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_moves_keep_all_bits_when_a_block_is_of_odd_size(dtype: torch.dtype) -> None:
    layers, device = [LayerShape(1, 3, 2), LayerShape(1, 1, 1)], torch.device("cpu")
    cache = KVCache(layers, 1, 3, 2, dtype, device)
    pools = [*cache.key_pools, *cache.value_pools]
    for number, pool in enumerate(pools):
        pool[0] = float(number + 1)
    cache.swap_out(_moves((0, 1)))
    cache.swap_in(_moves((1, 1)))
    cache.copy(_moves((1, 2)))
    for number, pool in enumerate(pools):
        assert set(pool.float().flatten().tolist()) == {number + 1}


def test_moves_change_nothing_when_empty(cache: KVCache) -> None:
    for move in (cache.swap_out, cache.swap_in, cache.copy):
        move(_moves())
    assert _owners(cache) == [[block] for block in range(NUM_BLOCKS)]


def test_cache_says_the_numbers_when_a_pool_does_not_fit() -> None:
    num_blocks = 2**45
    with pytest.raises(OutOfMemory, match=rf"device pool does not fit: {num_blocks} blocks of"):
        KVCache(LAYERS, BLOCK_SIZE, num_blocks, 0, torch.float32, torch.device("cpu"))


def test_cache_names_the_option_when_the_host_pool_does_not_fit() -> None:
    with pytest.raises(OutOfMemory, match=r"GiB\); num_host_blocks can be less"):
        KVCache(LAYERS, BLOCK_SIZE, 1, 2**45, torch.float32, torch.device("cpu"))


def test_cache_swaps_through_pageable_memory_when_it_cannot_be_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(memory: Bytes) -> None:
        raise RuntimeError(f"no more than {memory.nbytes - 1} bytes")

    monkeypatch.setattr("executor_service.device.kv_cache.pin_for", lambda _: refuse)
    cache = KVCache(LAYERS, BLOCK_SIZE, 2, 3, torch.float32, torch.device("cpu"))
    cache.key_pools[0][1] = 5.0
    cache.swap_out(_moves((1, 2)))
    cache.swap_in(_moves((2, 0)))
    assert bool((cache.key_pools[0][0] == 5.0).all())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert f"num_bytes={3 * cache.block_bytes} " in messages[0]
