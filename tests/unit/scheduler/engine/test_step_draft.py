"""What a step must tell the executor about its row table."""

from __future__ import annotations

from scheduler_service.scheduler.engine.step_draft import StepDraft
from scheduler_service.scheduler.values.request import Request
from scheduler_service.scheduler.values.sampling_params import SamplingParams


def make_draft(*new_row_ids: int) -> StepDraft:
    draft = StepDraft()
    for row_id in new_row_ids:
        request = Request.create(f"r{row_id}", [1], SamplingParams(), arrival=row_id, seed=0)
        request.sequence.row_id = row_id
        draft.add_row(request.sequence)
    return draft


def test_remove_names_the_row_when_the_executor_knows_it() -> None:
    draft = make_draft()
    draft.remove_row(3)
    assert draft.removed_row_ids == [3]


def test_remove_says_nothing_when_the_executor_was_never_told() -> None:
    draft = make_draft(3)
    draft.remove_row(3)
    assert (draft.removed_row_ids, draft.new_rows) == ([], {})


def test_add_keeps_the_removal_when_a_known_row_gets_a_new_tenant() -> None:
    draft = make_draft()
    draft.remove_row(3)
    draft.add_row(make_draft(3).new_rows[3])
    assert draft.removed_row_ids == [3]
    assert list(draft.new_rows) == [3]
