"""Block pool and block manager."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.block_manager import Allocation, BlockManager
from scheduler_service.core.block_pool import BlockPool
from scheduler_service.core.request import Request, Sequence
from scheduler_service.core.sampling_params import SamplingParams


def make_sequence(num_tokens: int) -> Sequence:
    return Request.create("r", [1] * num_tokens, SamplingParams(), arrival=1, seed=0).sequence


@given(st.lists(st.integers(0, 5), max_size=40))
def test_pool_keeps_every_block_free_or_referenced(counts: list[int]) -> None:
    pool = BlockPool(16)
    taken: list[list[int]] = []
    for count in counts:
        if count <= pool.num_free and len(taken) % 3 < 2:
            taken.append(pool.allocate(count))
        elif taken:
            pool.free(taken.pop(0))
        held = [block for blocks in taken for block in blocks]
        assert len(held) == len(set(held)) == 16 - pool.num_free
        assert all(pool.reference_count(b) == (1 if b in held else 0) for b in range(16))


def test_pool_refuses_to_free_a_block_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_can_allocate_says_never_when_the_pool_is_too_small() -> None:
    manager = BlockManager(num_blocks=2, block_size=4)
    assert manager.can_allocate(make_sequence(9), others_run=False) is Allocation.NEVER
    assert manager.can_allocate(make_sequence(8), others_run=False) is Allocation.OK


def test_can_allocate_leaves_the_watermark_only_while_others_run() -> None:
    manager = BlockManager(num_blocks=200, block_size=4)
    sequence = make_sequence(199 * 4)
    assert manager.can_allocate(sequence, others_run=True) is Allocation.LATER
    assert manager.can_allocate(sequence, others_run=False) is Allocation.OK


def test_release_waits_for_the_step_that_still_writes() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    sequence = make_sequence(8)
    manager.allocate(sequence)
    sequence.last_step_id = 3
    manager.release(sequence, last_answered_step_id=1)
    assert manager.pool.num_free == 2
    manager.step_answered(2)
    assert manager.has_deferred
    manager.step_answered(3)
    assert manager.pool.num_free == 4
