"""The block manager: what fits, tables, forks, and blocks that steps in flight still write."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.blocks.block_manager import Allocation
from scheduler_service.scheduler.engine.blocks.prefix_cache import NO_HIT
from scheduler_service.scheduler.engine.row_columns import RELEASED
from scheduler_service.scheduler.values.request import Sequence
from tests.support.core.parts import Tables


def can_allocate(
    tables: Tables, num_tokens: int, *, others_run: bool = False, num_more_blocks: int = 0
) -> Allocation:
    sequence = tables.sequence([1] * num_tokens)
    return tables.blocks.can_allocate(
        sequence, NO_HIT, others_run=others_run, num_more_blocks=num_more_blocks
    )


# -- what fits ---------------------------------------------------------------------------------


def test_can_allocate_says_ok_when_the_last_free_block_is_enough() -> None:
    tables = Tables(num_device_blocks=3)
    tables.place(tables.sequence([1] * 4))
    assert can_allocate(tables, 8) is Allocation.OK


def test_can_allocate_says_later_when_others_hold_the_blocks() -> None:
    tables = Tables(num_device_blocks=3)
    tables.place(tables.sequence([1] * 4))
    assert can_allocate(tables, 9) is Allocation.LATER


def test_can_allocate_says_never_when_the_whole_pool_is_too_small() -> None:
    tables = Tables(num_device_blocks=3)
    assert can_allocate(tables, 13) is Allocation.NEVER


@pytest.mark.parametrize(("num_more", "allocation"), [(1, Allocation.OK), (2, Allocation.NEVER)])
def test_can_allocate_counts_what_else_is_needed_when_there_is_more(
    num_more: int, allocation: Allocation
) -> None:
    tables = Tables(num_device_blocks=3)
    assert can_allocate(tables, 8, num_more_blocks=num_more) is allocation


@pytest.mark.parametrize(
    ("others_run", "allocation"), [(True, Allocation.LATER), (False, Allocation.OK)]
)
def test_can_allocate_leaves_the_watermark_only_when_others_run(
    others_run: bool, allocation: Allocation
) -> None:
    tables = Tables(num_device_blocks=200, max_model_len=900)
    assert can_allocate(tables, 199 * 4, others_run=others_run) is allocation


def test_can_allocate_says_ok_when_only_the_watermark_is_left() -> None:
    tables = Tables(num_device_blocks=200, max_model_len=900)
    assert can_allocate(tables, 198 * 4, others_run=True) is Allocation.OK


def test_can_allocate_counts_blocks_that_are_in_use_once_when_they_are_shared() -> None:
    tables = Tables(num_device_blocks=4)
    tables.place_published(list(range(12)))
    sequence = tables.sequence([*range(12), 50])
    hit = tables.blocks.prefixes.find(sequence)
    assert hit.num_tokens == 12
    assert tables.blocks.can_allocate(sequence, hit, others_run=True) is Allocation.OK


def test_can_allocate_counts_found_blocks_as_taken_when_they_are_free() -> None:
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


def test_allocate_takes_the_first_window_only_when_the_model_slides() -> None:
    tables = Tables(sliding_window=4)
    assert len(tables.place(tables.sequence([1] * 40))) == 2


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


def test_extend_appends_fresh_blocks_when_a_table_grows() -> None:
    tables = Tables()
    sequence = tables.sequence([1] * 3)
    table = tables.place(sequence)
    fresh = tables.blocks.extend(sequence.row_id, 2)
    assert tables.table(sequence) == table + fresh
    assert tables.rows.num_slots[sequence.row_id] == 12


# -- forks -------------------------------------------------------------------------------------


def fork(tables: Tables, num_shared: int) -> tuple[list[int], list[int]]:
    """Tables of a source that has 10 tokens, and of its fork with as many."""
    request = tables.request([1] * 10, n=2)
    source, sequence = request.sequences
    return tables.place(source), tables.fork(source, sequence, num_shared)


def test_fork_shares_full_blocks_and_copies_the_rest_when_tokens_fill_no_block() -> None:
    tables = Tables()
    source, forked = fork(tables, 9)
    assert forked[:2] == source[:2]
    assert tables.blocks.draft.moves.copy == [(source[2], forked[2])]
    assert forked[2] not in source


def test_fork_copies_nothing_when_shared_tokens_fill_their_blocks() -> None:
    tables = Tables()
    source, forked = fork(tables, 8)
    assert forked[:2] == source[:2]
    assert not tables.blocks.draft.moves


def test_fork_shares_nothing_when_less_than_a_block_is_common() -> None:
    tables = Tables()
    source, forked = fork(tables, 3)
    assert set(source).isdisjoint(forked)
    assert tables.blocks.draft.moves.copy == [(source[0], forked[0])]


def test_fork_keeps_both_ends_of_a_copy_when_the_sequences_leave_before_the_step() -> None:
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


def test_num_fork_blocks_counts_the_copy_and_what_follows_when_the_fork_is_longer() -> None:
    tables = Tables()
    assert tables.blocks.num_fork_blocks(tables.sequence([1] * 10), 9) == 1
    assert tables.blocks.num_fork_blocks(tables.sequence([1] * 13), 7) == 3


def test_fork_shares_only_the_window_when_the_source_released_what_is_behind() -> None:
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


def running_in_step(tables: Tables, step_id: int) -> Sequence:
    sequence = tables.sequence([1] * 8)
    tables.place(sequence)
    tables.rows.last_step_id[sequence.row_id] = step_id
    return sequence


def test_release_waits_for_the_step_when_it_still_writes() -> None:
    tables = Tables(num_device_blocks=4)
    sequence = running_in_step(tables, 3)
    tables.blocks.release(sequence.row_id, last_answered_step_id=1)
    assert (tables.blocks.device.num_free, tables.blocks.num_deferred) == (2, 2)
    tables.blocks.step_answered(2)
    assert tables.blocks.num_deferred == 2
    tables.blocks.step_answered(3)
    assert (tables.blocks.device.num_free, tables.blocks.num_deferred) == (4, 0)


def test_release_frees_at_once_when_the_last_step_is_answered() -> None:
    tables = Tables(num_device_blocks=4)
    sequence = running_in_step(tables, 3)
    tables.blocks.release(sequence.row_id, last_answered_step_id=3)
    assert tables.blocks.device.num_free == 4


def test_release_behind_windows_frees_once_when_the_row_is_released_later() -> None:
    tables = Tables(num_device_blocks=8, sliding_window=4)
    sequence = tables.sequence([1] * 8)
    tables.place(sequence)
    tables.rows.num_computed[sequence.row_id] = 8
    for _ in range(2):
        tables.slide(sequence)
    assert tables.table(sequence)[0] == RELEASED
    assert tables.blocks.device.num_free == 7
    tables.leave(sequence)
    assert tables.blocks.device.num_free == 8
