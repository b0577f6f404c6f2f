"""The moves of many steps on the device that is there, against plain numbers, one by one."""

from __future__ import annotations

import random

import pytest
import torch

from executor_service.device import (
    BlockTransfers,
    CopyBlocks,
    KVCache,
    LayerShape,
    copy_in_torch,
    streams_of,
)
from tests.support.steps.step_driver import Row, make_moves, make_step

NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS, NUM_STEPS = 9, 5, 120
LARGEST = 2**20
Pairs = list[tuple[int, int]]


def _choose(chance: random.Random, num_sources: int, num_targets: int) -> Pairs:
    targets = chance.sample(range(num_targets), chance.choice((0, 0, 1, 2)))
    return [(chance.randrange(num_sources), target) for target in targets]


def _triton_copy() -> CopyBlocks:
    pytest.importorskip("triton", reason="triton is not installed")
    from splitserve_kernels.gpu.kv_write import copy_blocks

    return copy_blocks


class Numbers:
    """Two pools whose blocks are one number each."""

    def __init__(self) -> None:
        self.device = [0] * NUM_DEVICE_BLOCKS
        self.host = [0] * NUM_HOST_BLOCKS

    def move(self, swap_out: Pairs, swap_in: Pairs, copied: Pairs) -> None:
        for pairs, source, target in (
            (swap_out, self.device, self.host),
            (swap_in, self.host, self.device),
            (copied, self.device, self.device),
        ):
            for source_block, target_block in pairs:
                target[target_block] = source[source_block]


def _make_cache(device: torch.device, copy_blocks: CopyBlocks = copy_in_torch) -> KVCache:
    # Megabytes on a GPU, so that a copy takes longer than to ask for what comes next.
    size = 2**18 if device.type == "cuda" else 8
    layers = [LayerShape(1, size, size)]
    sizes = (2, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS)
    return KVCache(layers, *sizes, torch.float32, device, copy_blocks)


@pytest.mark.parametrize("is_triton", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_hold_what_they_should_when_swaps_overlap_computing(
    seed: int, is_triton: bool, device: torch.device
) -> None:
    chance, numbers = random.Random(seed), Numbers()
    cache = _make_cache(device, _triton_copy() if is_triton else copy_in_torch)
    transfers = BlockTransfers(cache, streams_of(device))
    for _ in range(NUM_STEPS):
        swap_out = _choose(chance, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS)
        swap_in = _choose(chance, NUM_HOST_BLOCKS, NUM_DEVICE_BLOCKS)
        first, second = chance.sample(range(NUM_DEVICE_BLOCKS), 2)
        copied = [(first, second)] if chance.random() < 0.3 else []
        rows = [Row([0], 0, (block,), 1) for block in (first, second)]
        step = make_step(rows, make_moves(*swap_out), make_moves(*swap_in), make_moves(*copied))
        timers = transfers.begin(step)
        numbers.move(swap_out, swap_in, copied)
        for block in (first, second):
            numbers.device[block] = (numbers.device[block] + block + 1) % LARGEST
            for pool in (cache.key_pools[0], cache.value_pools[0]):
                pool[block].add_(block + 1).remainder_(LARGEST)
        if chance.random() < 0.5:
            assert transfers.finish(timers) >= 0
    expected = torch.tensor(numbers.device, dtype=torch.float32)[:, None]
    for pool in (cache.key_pools[0], cache.value_pools[0]):
        assert bool((pool.flatten(1).cpu() == expected).all())


def test_host_pool_is_pinned_when_the_device_is_a_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("there is no CUDA device")
    cache = KVCache([LayerShape(2, 8, 8)], 4, 3, 7, torch.bfloat16, device)
    assert cache._host_pool.is_pinned()
