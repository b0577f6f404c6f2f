"""A map says of each block what its pool says of it, asked one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.scheduler.engine.blocks.block_pool import BlockPool
from scheduler_service.watching.live_moment import BlockState, PoolMap, block_states
from splitserve.scheduler.v1 import live_pb2 as live
from splitserve_live.state import Pool

NUM_BLOCKS = 12

Held = list[list[int]]


def worked_pool(data: st.DataObject) -> tuple[BlockPool, Held]:
    """A pool after any sequence of calls, and the tables that hold its blocks."""
    pool, tables = BlockPool(NUM_BLOCKS), Held()
    for number in range(data.draw(st.integers(0, 25))):
        match data.draw(st.sampled_from(["allocate", "share", "free", "publish"])):
            case "allocate":
                count = data.draw(st.integers(0, pool.num_free))
                tables.append(pool.allocate(count))
            case "share" if tables:
                table = data.draw(st.sampled_from(tables))
                pool.share(table)
                tables.append(list(table))
            case "free" if tables:
                pool.free(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
            case "publish" if any(tables):
                table = data.draw(st.sampled_from([table for table in tables if table]))
                if pool.hash_of(table[0]) is None:
                    pool.publish(table[0], number.to_bytes(4, "big"))
            case _:
                pass
    return pool, tables


def expected_state(pool: BlockPool, block: int, given_back: list[int], moved: set[int]) -> int:
    if block in moved:
        return BlockState.ON_THE_MOVE
    count = pool.reference_count(block)
    if count == 0:
        return BlockState.FREE if pool.hash_of(block) is None else BlockState.CACHED
    if given_back.count(block) == count:
        return BlockState.GIVEN_BACK
    return BlockState.HELD if count == 1 else BlockState.SHARED


@given(st.data())
def test_block_states_are_those_of_each_block_when_a_pool_was_used(data: st.DataObject) -> None:
    pool, tables = worked_pool(data)
    some = data.draw(st.lists(st.sampled_from(tables), unique_by=id)) if tables else []
    given_back = [block for table in some for block in table]
    moved = data.draw(st.sets(st.integers(0, NUM_BLOCKS - 1)))
    assert block_states(pool, given_back, moved).tolist() == [
        expected_state(pool, block, given_back, moved) for block in range(NUM_BLOCKS)
    ]


@given(st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.integers(0, 3)), max_size=6))
def test_pool_map_brings_a_watcher_to_each_state_when_it_tells_what_changed(
    moments: list[tuple[bytes, int]],
) -> None:
    before, seen = None, Pool()
    for states, holder in moments:
        told = live.LivePool()
        now = PoolMap(16, np.frombuffer(states, np.uint8), np.full(8, holder))
        now.tell_changes(before, told)
        seen.take(told)
        assert (bytes(seen.states), seen.holders) == (states, [holder] * 8)
        assert seen.block_size == 16
        before = now


def test_pool_map_tells_nothing_when_nothing_has_changed() -> None:
    before, now = (PoolMap(16, np.ones(4, np.uint8), np.arange(4)) for _ in range(2))
    again = live.LivePool()
    now.tell_changes(before, again)
    assert (again.num_blocks, list(again.changed), again.states) == (4, [], b"")


def test_block_is_shared_when_more_have_it_than_a_byte_counts() -> None:
    pool = BlockPool(NUM_BLOCKS)
    shared, alone = pool.allocate(2)
    for _ in range(300):
        pool.share([shared])

    states = block_states(pool, (), ())

    assert (states[shared], states[alone]) == (BlockState.SHARED, BlockState.HELD)
