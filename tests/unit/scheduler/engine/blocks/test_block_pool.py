"""The block pool: references, contents, and the order in which blocks are reused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.scheduler.engine.blocks.block_pool import BlockPool


def name(block_id: int) -> bytes:
    return b"contents of %d" % block_id


def make_pool(num_blocks: int, tables: list[list[int]]) -> BlockPool:
    """A pool whose blocks are all published, and freed again table by table."""
    pool = BlockPool(num_blocks)
    for block_id in pool.allocate(num_blocks):
        pool.publish(block_id, name(block_id))
    for table in tables:
        pool.free(table)
    return pool


@given(st.lists(st.integers(0, 5), max_size=40))
def test_pool_keeps_blocks_free_or_referenced_when_they_come_and_go(
    counts: list[int],
) -> None:
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


def test_allocate_asserts_when_there_are_not_enough_blocks() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="beyond the pool"):
        pool.allocate(3)


def test_allocate_takes_nothing_when_asked_for_nothing() -> None:
    pool = BlockPool(2)
    assert pool.allocate(0) == []
    assert pool.num_free == 2


def test_allocate_prefers_blank_blocks_when_others_are_findable() -> None:
    pool = make_pool(4, [[0, 1]])
    pool.unpublish(1)
    assert pool.allocate(1) == [1]
    assert pool.find(name(0)) == 0


def test_allocate_evicts_the_least_recently_freed_when_all_are_findable() -> None:
    pool = make_pool(4, [[2], [0], [3], [1]])
    assert pool.allocate(3) == [2, 0, 3]


def test_allocate_evicts_the_end_of_a_prefix_first_when_a_table_was_freed() -> None:
    pool = make_pool(4, [[0, 1, 2], [3]])
    assert pool.allocate(3) == [2, 1, 0]


def test_allocate_evicts_a_block_late_when_it_was_used_again() -> None:
    pool = make_pool(3, [[0], [1], [2]])
    pool.share([0])
    pool.free([0])
    assert pool.allocate(2) == [1, 2]


def test_allocate_tells_what_is_lost_when_a_findable_block_is_reused() -> None:
    lost: list[tuple[int, bytes]] = []
    pool = BlockPool(2, on_evict=lambda block_id, block_hash: lost.append((block_id, block_hash)))
    blocks = pool.allocate(2)
    pool.publish(blocks[0], b"a")
    pool.free(blocks)
    pool.allocate(2)
    assert lost == [(blocks[0], b"a")]
    assert pool.find(b"a") is None


def test_free_asserts_when_a_block_is_freed_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_free_keeps_a_block_when_somebody_shares_it() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.free(blocks)
    assert (pool.num_free, pool.reference_count(blocks[0])) == (1, 1)
    pool.free(blocks)
    assert pool.num_free == 2


def test_free_drops_each_reference_when_a_block_is_named_twice() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.free(blocks * 2)
    assert pool.num_free == 1


def test_share_takes_a_block_out_of_the_free_ones_when_nobody_has_it() -> None:
    pool = make_pool(2, [[0, 1]])
    pool.share([1])
    assert pool.num_free == 1
    assert pool.num_referenced([0, 1]) == 1
    assert pool.allocate(1) == [0]


def test_find_sees_a_free_block_when_it_was_not_reused() -> None:
    pool = make_pool(2, [[0, 1]])
    assert pool.find(name(1)) == 1
    assert pool.num_referenced([1]) == 0


def test_publish_keeps_the_first_block_when_two_hold_the_same() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.publish(first, b"a")
    assert not pool.publish(second, b"a")
    assert pool.find(b"a") == first
    assert pool.num_published == 1


def test_publish_agrees_when_a_block_says_the_same_again() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    assert pool.publish(block, b"a")
    assert pool.publish(block, b"a")


def test_unpublish_makes_a_block_blank_when_it_is_free() -> None:
    pool = make_pool(2, [[0, 1]])
    pool.unpublish(0)
    assert pool.find(name(0)) is None
    assert pool.num_free == 2
    assert pool.allocate(2) == [0, 1]


def test_unpublish_leaves_references_alone_when_a_block_is_in_use() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a")
    pool.unpublish(block)
    assert pool.find(b"a") is None
    pool.free([block])
    assert pool.num_free == 1


def test_unpublish_does_nothing_when_nothing_was_said() -> None:
    pool = BlockPool(1)
    pool.unpublish(0)
    assert pool.num_free == 1
