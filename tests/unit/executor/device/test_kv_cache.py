"""KV pools, moves of their blocks, and the host memory under them."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest
import torch

from executor_service.device import (
    Bytes,
    KVCache,
    LayerShape,
    block_bytes,
    host_memory,
    pin_for,
    pin_for_cuda,
)
from executor_service.errors import OutOfMemory
from tests.support.steps.step_driver import make_moves

# Layers of unequal shape, as some models have them.
LAYERS = (LayerShape(2, 4, 4), LayerShape(1, 3, 5))
BLOCK_SIZE = 3
NUM_BLOCKS = 6


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


Pairs = tuple[tuple[int, int], ...]


@pytest.mark.parametrize(
    ("moves", "owners"),
    [
        ([("copy", ((0, 3), (0, 4), (2, 5)))], [0, 1, 2, 0, 0, 2]),
        # Blocks trade places: all are read before one is written.
        ([("copy", ((0, 1), (1, 2), (2, 0)))], [2, 0, 1, 3, 4, 5]),
        (
            [
                ("swap_out", ((5, 0), (1, 3))),
                ("copy", ((0, 5), (2, 1))),
                ("swap_in", ((0, 4), (3, 3))),
            ],
            [0, 2, 2, 1, 5, 0],
        ),
        # Ids that follow each other, and others.
        (
            [
                ("swap_out", ((3, 0), (4, 1), (5, 3), (3, 2))),
                ("swap_in", ((3, 0), (1, 1), (2, 2), (0, 5))),
            ],
            [5, 4, 3, 3, 4, 3],
        ),
        ([("swap_out", ()), ("swap_in", ()), ("copy", ())], [0, 1, 2, 3, 4, 5]),
    ],
    ids=["one source for two", "cycle", "through the host", "runs of ids", "empty"],
)
def test_moves_put_whole_blocks_where_they_are_told(
    cache: KVCache, moves: list[tuple[str, Pairs]], owners: list[int]
) -> None:
    for name, pairs in moves:
        getattr(cache, name)(make_moves(*pairs))
    assert _owners(cache) == [[owner] for owner in owners]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_moves_keep_all_bits_when_a_block_is_of_odd_size(dtype: torch.dtype) -> None:
    layers, device = [LayerShape(1, 3, 2), LayerShape(1, 1, 1)], torch.device("cpu")
    cache = KVCache(layers, 1, 3, 2, dtype, device)
    pools = [*cache.key_pools, *cache.value_pools]
    for number, pool in enumerate(pools):
        pool[0] = float(number + 1)
    cache.swap_out(make_moves((0, 1)))
    cache.swap_in(make_moves((1, 1)))
    cache.copy(make_moves((1, 2)))
    for number, pool in enumerate(pools):
        assert set(pool.float().flatten().tolist()) == {number + 1}


@pytest.mark.parametrize(
    ("num_blocks", "message"),
    [
        ((2**45, 0), rf"device pool does not fit: {2**45} blocks of"),
        ((1, 2**45), r"GiB\); lower --num-host-blocks"),
    ],
)
def test_cache_names_numbers_and_option_when_a_pool_does_not_fit(
    num_blocks: tuple[int, int], message: str
) -> None:
    with pytest.raises(OutOfMemory, match=message):
        KVCache(LAYERS, BLOCK_SIZE, *num_blocks, torch.float32, torch.device("cpu"))


def test_cache_swaps_through_pageable_memory_when_it_cannot_be_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(memory: Bytes) -> None:
        raise RuntimeError(f"no more than {memory.nbytes - 1} bytes")

    monkeypatch.setattr("executor_service.device.kv_cache.pin_for", lambda _: refuse)
    cache = KVCache(LAYERS, BLOCK_SIZE, 2, 3, torch.float32, torch.device("cpu"))
    cache.key_pools[0][1] = 5.0
    cache.swap_out(make_moves((1, 2)))
    cache.swap_in(make_moves((2, 0)))
    assert bool((cache.key_pools[0][0] == 5.0).all())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert f"num_bytes={3 * cache.block_bytes} " in messages[0]


@dataclass(slots=True)
class FakeRuntime:
    """Counts what is pinned, as the CUDA runtime does; `status` is what it answers."""

    status: int = 0
    pinned: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        if self.status == 0:
            self.pinned[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    return runtime


def test_host_memory_is_zero_and_pinned_once_when_it_can_be() -> None:
    pinned: list[Bytes] = []
    memory = host_memory(100, pinned.append)
    assert (memory.shape, memory.dtype, int(memory.sum())) == ((100,), torch.uint8, 0)
    assert [array.ctypes.data for array in pinned] == [memory.data_ptr()]


@pytest.mark.parametrize("num_bytes", [1, 100, 2**20, 2**24 + 5])
def test_host_memory_begins_with_a_cache_line(num_bytes: int) -> None:
    memory = host_memory(num_bytes, None)
    assert (len(memory), memory.data_ptr() % 64) == (num_bytes, 0)


def test_host_memory_has_its_pages_when_it_is_pinned() -> None:
    process, num_bytes, resident = psutil.Process(), 2**28, []
    before = process.memory_info().rss
    memory = host_memory(num_bytes, lambda _: resident.append(process.memory_info().rss))
    assert resident[0] - before > 0.9 * len(memory)


def test_host_memory_warns_once_when_it_cannot_be_pinned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_: Bytes) -> None:
        raise RuntimeError("the driver says no")

    memory = host_memory(3 * 2**20, refuse)
    assert memory.shape == (3 * 2**20,)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    message = caplog.records[0].getMessage()
    assert message.startswith("host_pool_not_pinned num_bytes=3145728 gib=0.00")
    assert "the driver says no" in message


def test_host_memory_pins_nothing_when_it_is_empty() -> None:
    pinned: list[Bytes] = []
    assert host_memory(0, pinned.append).shape == (0,)
    assert not pinned


def test_pin_for_pins_when_the_device_is_a_gpu() -> None:
    assert pin_for(torch.device("cpu")) is None
    assert pin_for(torch.device("cuda", 1)) is pin_for_cuda


def test_pin_for_cuda_unpins_when_the_memory_is_freed(runtime: FakeRuntime) -> None:
    memory = host_memory(1000, pin_for_cuda)
    assert runtime.pinned == {memory.data_ptr(): 1000}
    view = memory.view(10, 100)
    del memory
    gc.collect()
    assert runtime.pinned
    del view
    gc.collect()
    assert not runtime.pinned


def test_pin_for_cuda_raises_when_the_runtime_refuses(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.status = 2
    forgotten: list[bool] = []
    monkeypatch.setattr(
        "executor_service.device.kv_cache._forget_error", lambda: forgotten.append(True)
    )
    with pytest.raises(RuntimeError, match="cudaHostRegister: error 2"):
        pin_for_cuda(np.zeros(10, np.uint8))
    assert not runtime.pinned
    assert forgotten == [True]
