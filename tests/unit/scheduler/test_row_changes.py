"""What a step must tell the executor about its row table."""

from __future__ import annotations

from scheduler_service.core.request import Request
from scheduler_service.core.row_changes import RowChanges, TableWrites
from scheduler_service.core.sampling_params import SamplingParams


def make_changes(*new_row_ids: int) -> RowChanges:
    changes = RowChanges()
    for row_id in new_row_ids:
        request = Request.create(f"r{row_id}", [1], SamplingParams(), arrival=row_id, seed=0)
        request.sequence.row_id = row_id
        changes.add(request.sequence)
    return changes


def columns(writes: TableWrites) -> tuple[list[int], list[int], list[int], list[int]]:
    return writes.row_ids, writes.start_indexes, writes.counts, writes.block_ids


def test_remove_names_the_row_when_the_executor_knows_it() -> None:
    changes = make_changes()
    changes.remove(3)
    assert changes.removed_row_ids == [3]


def test_remove_says_nothing_when_the_executor_was_never_told() -> None:
    changes = make_changes(3)
    changes.remove(3)
    assert (changes.removed_row_ids, changes.new) == ([], {})


def test_add_keeps_the_removal_when_a_known_row_gets_a_new_tenant() -> None:
    changes = make_changes()
    changes.remove(3)
    changes.add(make_changes(3).new[3])
    assert changes.removed_row_ids == [3]
    assert list(changes.new) == [3]


def test_extend_writes_nothing_when_the_row_is_new() -> None:
    changes = make_changes(3)
    changes.extend(3, 1, [8])
    assert not changes.table_writes


def test_extend_joins_the_writes_when_a_table_grows_twice() -> None:
    changes = make_changes()
    changes.extend(3, 2, [8])
    changes.extend(4, 1, [7])
    changes.extend(3, 3, [9, 5])
    assert columns(changes.table_writes) == ([4, 3], [1, 2], [1, 3], [7, 8, 9, 5])


def test_remove_drops_the_write_when_the_row_goes_after_it_grew() -> None:
    changes = make_changes()
    changes.extend(3, 2, [8, 6])
    changes.extend(4, 1, [7])
    changes.remove(3)
    assert columns(changes.table_writes) == ([4], [1], [1], [7])
    assert 3 not in changes.table_writes


def test_shorten_takes_the_last_block_from_the_write_of_the_row_when_it_has_several() -> None:
    changes = make_changes()
    for row_id, blocks in ((3, [8, 6]), (4, [7]), (5, [1])):
        changes.extend(row_id, 2, blocks)
    for row_id in (3, 4, 9):
        changes.table_writes.shorten(row_id)
    assert columns(changes.table_writes) == ([3, 5], [2, 2], [1, 1], [8, 1])


def test_add_each_writes_one_block_for_each_row_when_tables_grow() -> None:
    writes = TableWrites()
    writes.add_each([3, 4], [2, 0], [8, 9])
    assert columns(writes) == ([3, 4], [2, 0], [1, 1], [8, 9])
    assert writes.drop(4) == [9]
    assert writes.drop(4) == []
