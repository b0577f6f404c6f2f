"""What a step must tell the executor about its row table."""

from __future__ import annotations

from scheduler_service.core.request import Request
from scheduler_service.core.row_changes import RowChanges
from scheduler_service.core.sampling_params import SamplingParams


def make_changes(*new_row_ids: int) -> RowChanges:
    changes = RowChanges()
    for row_id in new_row_ids:
        request = Request.create(f"r{row_id}", [1], SamplingParams(), arrival=row_id, seed=0)
        request.sequence.row_id = row_id
        changes.add(request.sequence)
    return changes


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
