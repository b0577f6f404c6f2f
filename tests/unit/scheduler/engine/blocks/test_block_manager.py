"""Blocks: the pool, what fits, tables, forks, swaps, and the host pool as a cache."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.scheduler.engine import NO_STAY, RELEASED
from scheduler_service.scheduler.engine.blocks import NO_HIT, Allocation, BlockPool
from scheduler_service.scheduler.values import Request, SequenceStatus
from tests.support.core.driver import Tables


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


def test_allocate_asserts_when_there_are_not_enough_blocks() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="beyond the pool"):
        pool.allocate(3)


def test_allocate_prefers_blank_blocks_when_others_are_findable() -> None:
    pool = make_pool(4, [[0, 1]])
    pool.unpublish(1)
    assert pool.allocate(1) == [1]
    assert pool.find(name(0)) == 0


def test_allocate_evicts_the_least_recently_freed_when_all_are_findable() -> None:
    pool = make_pool(4, [[2], [0], [3], [1]])
    assert pool.allocate(3) == [2, 0, 3]


def test_allocate_evicts_the_end_of_a_prefix_first() -> None:
    pool = make_pool(4, [[0, 1, 2], [3]])
    assert pool.allocate(3) == [2, 1, 0]


def test_allocate_evicts_a_block_late_when_it_was_used_again() -> None:
    pool = make_pool(3, [[0], [1], [2]])
    pool.share([0])
    pool.free([0])
    assert pool.allocate(2) == [1, 2]


def test_allocate_reports_the_hash_of_an_evicted_block() -> None:
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


def test_free_drops_each_reference_when_a_block_is_named_twice() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.free(blocks * 2)
    assert pool.num_free == 1


def test_share_takes_a_block_out_of_the_free_ones() -> None:
    pool = make_pool(2, [[0, 1]])
    pool.share([1])
    assert pool.num_free == 1
    assert pool.num_referenced([0, 1]) == 1
    assert pool.allocate(1) == [0]


def test_publish_keeps_the_first_block_when_two_hold_the_same() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.publish(first, b"a")
    assert not pool.publish(second, b"a")
    assert pool.find(b"a") == first
    assert pool.num_published == 1


def test_unpublish_makes_a_block_blank_when_it_is_free() -> None:
    pool = make_pool(2, [[0, 1]])
    pool.unpublish(0)
    assert pool.find(name(0)) is None
    assert pool.num_free == 2
    assert pool.allocate(2) == [0, 1]


# -- what fits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_blocks", "num_placed_tokens", "num_tokens", "options", "allocation"),
    [
        (3, 4, 8, {}, Allocation.OK),
        (3, 4, 9, {}, Allocation.LATER),
        (3, 0, 13, {}, Allocation.NEVER),
        (3, 0, 8, {"num_more_blocks": 1}, Allocation.OK),
        (3, 0, 8, {"num_more_blocks": 2}, Allocation.NEVER),
        # The watermark of 200 blocks is two.
        (200, 0, 199 * 4, {"others_run": True}, Allocation.LATER),
        (200, 0, 198 * 4, {"others_run": True}, Allocation.OK),
        (200, 0, 199 * 4, {}, Allocation.OK),
    ],
)
def test_can_allocate_compares_free_blocks_with_needed_ones(
    num_blocks: int,
    num_placed_tokens: int,
    num_tokens: int,
    options: dict[str, Any],
    allocation: Allocation,
) -> None:
    tables = Tables(num_device_blocks=num_blocks, max_model_len=900)
    if num_placed_tokens:
        tables.place(tables.sequence([1] * num_placed_tokens))
    sequence = tables.sequence([1] * num_tokens)
    options = {"others_run": False, "num_more_blocks": 0} | options
    assert tables.blocks.can_allocate(sequence, NO_HIT, **options) is allocation


def test_can_allocate_counts_shared_blocks_once() -> None:
    tables = Tables(num_device_blocks=4)
    tables.place_published(list(range(12)))
    sequence = tables.sequence([*range(12), 50])
    hit = tables.blocks.prefixes.find(sequence)
    assert hit.num_tokens == 12
    assert tables.blocks.can_allocate(sequence, hit, others_run=True) is Allocation.OK


def test_can_allocate_counts_found_free_blocks_as_taken() -> None:
    tables = Tables(num_device_blocks=4)
    published, _ = tables.place_published(list(range(12)))
    tables.leave(published)
    tables.place(tables.sequence([70]))
    # Three found blocks are free, and needed: none is left for the last token.
    sequence = tables.sequence([*range(12), 50])
    hit = tables.blocks.prefixes.find(sequence)
    assert tables.blocks.can_allocate(sequence, hit, others_run=True) is Allocation.LATER


# -- tables ------------------------------------------------------------------------------------


def test_allocate_shares_what_was_found_when_there_is_a_hit() -> None:
    tables = Tables()
    _, table = tables.place_published(list(range(9)))
    sequence = tables.sequence([*range(8), 50])
    other = tables.place(sequence, tables.blocks.prefixes.find(sequence))
    assert other[:2] == table[:2]
    assert other[2] != table[2]
    counts = [tables.blocks.device.reference_count(block) for block in other]
    assert counts == [2, 2, 1]


def test_allocate_begins_within_the_window_when_there_is_a_hit() -> None:
    tables = Tables(sliding_window=4)
    sequence = tables.sequence(list(range(12)))
    table = tables.place(sequence) + tables.blocks.extend(sequence.row_id, 1)
    tables.blocks.prefixes.publish(sequence, sequence.token_ids, table, 0)
    follower = tables.sequence(list(range(13)))
    hit = tables.blocks.prefixes.find(follower)
    assert tables.place(follower, hit)[:3] == [RELEASED, RELEASED, table[2]]
    assert tables.rows.held_blocks(follower.row_id)[0] == table[2]
    tables.leave(follower)
    assert tables.blocks.device.reference_count(table[2]) == 1


# -- forks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_shared_tokens", "num_shared_blocks", "copies"),
    [(9, 2, True), (8, 2, False), (3, 0, True)],
)
def test_fork_shares_full_blocks_and_copies_a_partial_one(
    num_shared_tokens: int, num_shared_blocks: int, copies: bool
) -> None:
    tables = Tables()
    source, sequence = tables.request([1] * 10, n=2).sequences
    table, forked = tables.place(source), tables.fork(source, sequence, num_shared_tokens)
    assert forked[:num_shared_blocks] == table[:num_shared_blocks]
    assert set(forked[num_shared_blocks:]).isdisjoint(table)
    copied = [(table[num_shared_blocks], forked[num_shared_blocks])] if copies else []
    assert tables.blocks.draft.moves.copy == copied


def test_fork_keeps_both_ends_of_a_copy_until_the_step() -> None:
    tables = Tables(num_device_blocks=4)
    request = tables.request([1] * 10, n=2)
    source, sequence = request.sequences
    pair = {tables.place(source)[2], tables.fork(source, sequence, 9)[2]}
    tables.leave(source)
    tables.leave(sequence)
    assert tables.blocks.device.num_free == 2
    assert pair.isdisjoint(tables.blocks.device.allocate(2))
    tables.blocks.take_draft()
    assert set(tables.blocks.device.allocate(2)) == pair


def test_num_fork_blocks_counts_the_copy_and_the_rest() -> None:
    tables = Tables()
    assert tables.blocks.num_fork_blocks(tables.sequence([1] * 10), 9) == 1
    assert tables.blocks.num_fork_blocks(tables.sequence([1] * 13), 7) == 3


def test_fork_shares_only_the_window_behind_released_blocks() -> None:
    tables = Tables(sliding_window=4)
    request = tables.request([1] * 12, n=2)
    source, sequence = request.sequences
    tables.place(source)
    tables.blocks.extend(source.row_id, 1)
    tables.rows.num_computed[source.row_id] = 11
    tables.slide(source)
    forked = tables.fork(source, sequence, 11)
    assert forked[:2] == [RELEASED, RELEASED]
    tables.leave(source)
    tables.leave(sequence)
    tables.blocks.take_draft()
    assert tables.blocks.device.num_free == tables.config.num_device_blocks


# -- blocks that a step in flight writes -------------------------------------------------------


@pytest.mark.parametrize("last_answered", [1, 3])
def test_release_waits_for_the_step_that_still_writes(last_answered: int) -> None:
    tables = Tables(num_device_blocks=4)
    sequence = tables.sequence([1] * 8)
    tables.place(sequence)
    tables.rows.last_step_id[sequence.row_id] = 3
    tables.blocks.release(sequence.row_id, last_answered_step_id=last_answered)
    assert tables.blocks.num_deferred == (0 if last_answered == 3 else 2)
    tables.blocks.step_answered(2)
    assert tables.blocks.num_deferred == (0 if last_answered == 3 else 2)
    tables.blocks.step_answered(3)
    assert (tables.blocks.device.num_free, tables.blocks.num_deferred) == (4, 0)


def make_pair(tables: Tables) -> Request:
    """A request of two running sequences that share two full blocks of three."""
    request = tables.request([1] * 10, n=2)
    first, second = request.sequences
    tables.place(first)
    tables.fork(first, second, 9)
    tables.blocks.take_draft()
    return request


def swap_out(tables: Tables, request: Request) -> list[tuple[int, int]]:
    """As a preemption does it; returns the moves."""
    tables.blocks.swap_out(request)
    for sequence in request.sequences:
        tables.leave(sequence)
        sequence.status = SequenceStatus.SWAPPED
    cross, request.cross_blocks = request.cross_blocks, []
    tables.blocks.device.free(cross)
    return tables.blocks.take_draft().moves.swap_out


def swap_in(tables: Tables, request: Request) -> list[tuple[int, int]]:
    for sequence in request.sequences:
        tables.rows.add(sequence, (request.arrival,), sequence.num_computed)
    tables.blocks.swap_in(request)
    return tables.blocks.take_draft().moves.swap_in


@pytest.mark.parametrize(("num_host_blocks", "fits"), [(4, True), (3, False)])
def test_can_swap_out_counts_shared_blocks_once(num_host_blocks: int, fits: bool) -> None:
    tables = Tables(num_host_blocks=num_host_blocks)
    assert tables.blocks.can_swap_out(make_pair(tables)) is fits


def test_swap_in_restores_sharing_when_a_pair_comes_back() -> None:
    tables = Tables(num_host_blocks=8)
    request = make_pair(tables)
    first, second = request.sequences
    to_host = dict(swap_out(tables, request))
    tables.blocks.device.allocate(5)  # So that it comes back elsewhere.
    to_device = dict(swap_in(tables, request))
    assert sorted(to_device) == sorted(to_host.values())
    shared = tables.table(first)[:2]
    assert tables.table(second)[:2] == shared
    assert tables.table(first)[2] != tables.table(second)[2]
    assert [tables.blocks.device.reference_count(block) for block in shared] == [2, 2]
    assert tables.blocks.host.num_free == 8


def test_swap_leaves_out_blocks_behind_the_window() -> None:
    tables = Tables(num_host_blocks=8, sliding_window=4)
    sequence = tables.sequence([1] * 8)
    tables.place(sequence)
    tables.rows.num_computed[sequence.row_id] = 8
    tables.slide(sequence)
    assert len(swap_out(tables, sequence.request)) == 1
    assert tables.blocks.num_swap_in_blocks(sequence.request) == 1
    swap_in(tables, sequence.request)
    assert tables.table(sequence)[0] == RELEASED
    tables.leave(sequence)
    assert tables.blocks.device.num_free == tables.config.num_device_blocks


def test_swap_in_keeps_blocks_of_both_pools_until_the_step() -> None:
    tables = Tables(num_device_blocks=2, num_host_blocks=2)
    sequence = tables.sequence([1] * 8)
    tables.place(sequence)
    swap_out(tables, sequence.request)
    tables.rows.add(sequence, (1,), sequence.num_computed)
    tables.blocks.swap_in(sequence.request)
    tables.leave(sequence)
    assert tables.blocks.has_pinned
    assert (tables.blocks.device.num_free, tables.blocks.host.num_free) == (0, 0)
    tables.blocks.take_draft()
    assert (tables.blocks.device.num_free, tables.blocks.host.num_free) == (2, 2)


# -- the encoder's blocks ----------------------------------------------------------------------


def test_allocate_cross_gives_blocks_once_when_asked_again() -> None:
    tables = Tables()
    request = tables.request([1], encoder=[5] * 9)
    assert tables.blocks.num_cross_blocks(request) == 3
    for _ in range(2):
        tables.blocks.allocate_cross(request)
    assert len(request.cross_blocks) == 3
    assert tables.blocks.num_cross_blocks(request) == 0
    assert tables.blocks.device.num_free == tables.config.num_device_blocks - 3


# -- the host pool as a cache ------------------------------------------------------------------


def test_allocate_copies_evicted_blocks_to_the_host_pool() -> None:
    tables = Tables(num_device_blocks=2, num_host_blocks=2)
    sequence, table = tables.place_published([1] * 8)
    tables.leave(sequence)
    tables.blocks.device.allocate(1)
    ((source, destination),) = tables.blocks.take_draft().moves.swap_out
    assert source == table[1]
    assert tables.blocks.host.find(sequence.block_hashes[2]) == destination


def make_demoted() -> Tables:
    """Only the host pool has the blocks of the tokens [1] * 8."""
    tables = Tables(num_device_blocks=4, num_host_blocks=4)
    sequence, _ = tables.place_published([1] * 8)
    tables.leave(sequence)
    tables.blocks.device.free(tables.blocks.device.allocate(4))
    tables.blocks.take_draft()
    return tables


def test_allocate_swaps_in_a_block_that_only_the_host_has() -> None:
    tables = make_demoted()
    follower = tables.sequence([1] * 9)
    hit = tables.blocks.prefixes.find(follower)
    table = tables.place(follower, hit)
    draft = tables.blocks.take_draft()
    assert draft.moves.swap_in == list(zip(hit.host_blocks, table[:2], strict=True))
    assert sorted(draft.published[NO_STAY]) == sorted(table[:2])
    assert tables.blocks.device.find(follower.block_hashes[1]) == table[0]


def test_allocate_keeps_swapped_in_blocks_until_the_step() -> None:
    tables = make_demoted()
    follower = tables.sequence([1] * 9)
    tables.place(follower, tables.blocks.prefixes.find(follower))
    tables.leave(follower)
    assert tables.blocks.has_pinned
    assert (tables.blocks.device.num_free, tables.blocks.host.num_free) == (2, 2)
    tables.blocks.take_draft()
    assert (tables.blocks.device.num_free, tables.blocks.host.num_free) == (4, 4)
