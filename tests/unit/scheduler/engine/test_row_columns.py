"""Columns of running rows, and what a step tells the executor of them."""

from __future__ import annotations

import numpy as np

from scheduler_service.scheduler.engine import NO_STAY, RowColumns, StepDraft
from scheduler_service.scheduler.values import (
    NO_ROW,
    Request,
    RowWork,
    SamplingParams,
    Sequence,
    SequenceStatus,
    TableWrites,
)


def make_rows() -> RowColumns:
    return RowColumns(max_num_rows=4, max_len=40, block_size=4, max_blocks=11)


def add(rows: RowColumns, urgency: int, *, num_blocks: int = 3) -> Sequence:
    """A running sequence of 6 tokens; it ends with 12."""
    request = Request.create(
        f"r{urgency}", list(range(6)), SamplingParams(), arrival=urgency, seed=0
    )
    request.stop_len = 12
    rows.add(request.sequence, (urgency,), num_computed=0)
    rows.extend_table(request.sequence.row_id, list(range(num_blocks)))
    return request.sequence


def plan(rows: RowColumns, sequences: list[Sequence], counts: list[int], step_id: int) -> RowWork:
    row_ids = np.array([sequence.row_id for sequence in sequences], np.int64)
    return rows.plan_work(row_ids, np.array(counts, np.int32), step_id)


def test_order_follows_ranks_when_rows_come_and_go() -> None:
    rows = make_rows()
    sequences = {urgency: add(rows, urgency) for urgency in (5, 1, 9)}
    assert rows.running == [sequences[1], sequences[5], sequences[9]]
    rows.remove(sequences[5])
    sequences[3] = add(rows, 3)
    assert rows.running == [sequences[1], sequences[3], sequences[9]]


def test_add_gives_every_stay_its_own_id() -> None:
    rows = make_rows()
    first = add(rows, 1)
    row_id, stay_id = first.row_id, int(rows.stay_ids[first.row_id])
    rows.remove(first)
    assert rows.stay_ids[row_id] == NO_STAY
    second = add(rows, 1)
    assert second.row_id == row_id
    assert rows.stay_ids[row_id] not in (stay_id, NO_STAY)


def test_add_starts_without_earlier_steps_of_the_row() -> None:
    rows = make_rows()
    first = add(rows, 1)
    plan(rows, [first], [6], step_id=3)
    rows.remove(first)
    row_id = add(rows, 1).row_id
    assert (rows.last_step_id[row_id], rows.sampled_in_step[row_id]) == (0, 0)


def test_remove_returns_tokens_and_promises_when_steps_are_in_flight() -> None:
    rows = make_rows()
    sequence = add(rows, 1)
    plan(rows, [sequence], [6], step_id=1)
    rows.remove(sequence)
    assert (sequence.row_id, sequence.num_promised) == (NO_ROW, 1)
    assert sequence.token_ids.tolist() == list(range(6))
    assert rows.num_free == 4


def test_stuck_lists_rows_in_order_when_they_lack_a_slot_or_end() -> None:
    rows = make_rows()
    ends, lacks, goes_on = add(rows, 5), add(rows, 1, num_blocks=2), add(rows, 3)
    for sequence, num_computed in ((ends, 11), (lacks, 8), (goes_on, 10)):
        rows.num_computed[sequence.row_id] = num_computed
    assert rows.stuck.tolist() == [lacks.row_id, ends.row_id]


def test_all_decode_is_false_when_one_row_has_more_to_compute() -> None:
    rows = make_rows()
    sequences = [add(rows, urgency) for urgency in (1, 2)]
    plan(rows, sequences[:1], [6], step_id=1)
    assert not rows.all_decode
    plan(rows, sequences[1:], [6], step_id=2)
    assert rows.all_decode


def test_free_rows_are_neither_stuck_nor_decode() -> None:
    rows = make_rows()
    full, decodes = add(rows, 1, num_blocks=2), add(rows, 2)
    for sequence in (full, decodes):
        plan(rows, [sequence], [6], step_id=1)
        rows.remove(sequence)
    assert (len(rows.stuck), rows.all_decode, rows.num_free) == (0, True, 4)


def test_find_current_tells_which_rows_were_given_to_others() -> None:
    rows = make_rows()
    first, second = add(rows, 1), add(rows, 2)
    work = rows.plan_work(rows.order, np.array([6, 6], np.int32), 1)
    assert rows.find_current(work) is None
    rows.remove(first)
    add(rows, 3)
    current = rows.find_current(work)
    assert current is not None
    assert current.tolist() == [False, True]
    assert work.row_ids[1] == second.row_id


def test_held_blocks_leaves_out_blocks_when_they_were_released() -> None:
    rows = make_rows()
    sequence = add(rows, 1)
    rows.num_released[sequence.row_id] = 2
    assert rows.held_blocks(sequence.row_id) == [2]
    assert rows.block_table(sequence.row_id).tolist() == [0, 1, 2]


def test_run_limit_is_the_tighter_of_slots_and_end() -> None:
    rows = make_rows()
    sequence = add(rows, 1, num_blocks=2)
    row_id = sequence.row_id
    assert rows.run_limit[row_id] == 8
    rows.extend_table(row_id, [7])
    assert rows.run_limit[row_id] == 11  # The twelfth token is the last: it is never an input.
    assert rows.shrink_table(row_id, 1) == [7]
    assert rows.run_limit[row_id] == 8


def test_extend_each_appends_different_numbers_of_blocks() -> None:
    rows = make_rows()
    first, second = add(rows, 1, num_blocks=2), add(rows, 2, num_blocks=1)
    row_ids = np.array([first.row_id, second.row_id], np.int64)
    rows.extend_each(row_ids, [7, 8, 9], np.array([1, 2], np.int32))
    assert rows.block_table(first.row_id).tolist() == [0, 1, 7]
    assert rows.block_table(second.row_id).tolist() == [0, 8, 9]
    assert rows.run_limit[row_ids].tolist() == [11, 11]


# -- what the executor is told of tables -----------------------------------------------------------


def columns(writes: TableWrites) -> tuple[list[int], list[int], list[int], list[int]]:
    columns = (writes.row_ids, writes.start_indexes, writes.counts, writes.block_ids)
    row_ids, starts, counts, blocks = (column.tolist() for column in columns)
    return row_ids, starts, counts, blocks


def test_take_table_writes_leaves_out_new_rows() -> None:
    rows = make_rows()
    new = [add(rows, 1).row_id, add(rows, 2).row_id]
    assert not rows.take_table_writes(new)


def test_take_table_writes_joins_several_extensions() -> None:
    rows = make_rows()
    first, second = add(rows, 2, num_blocks=2), add(rows, 1, num_blocks=1)
    rows.take_table_writes([first.row_id, second.row_id])
    rows.extend_table(first.row_id, [8])
    rows.extend_table(second.row_id, [7])
    rows.extend_table(first.row_id, [9, 5])
    expected = ([first.row_id, second.row_id], [2, 1], [3, 1], [8, 9, 5, 7])
    assert columns(rows.take_table_writes([])) == expected
    assert not rows.take_table_writes([])


def test_take_table_writes_leaves_out_blocks_taken_back() -> None:
    rows = make_rows()
    first, second = add(rows, 1, num_blocks=2), add(rows, 2, num_blocks=2)
    rows.take_table_writes([first.row_id, second.row_id])
    for sequence in (first, second):
        rows.extend_table(sequence.row_id, [8, 9])
    rows.shrink_table(first.row_id, 1)
    rows.remove(second)
    assert columns(rows.take_table_writes([])) == ([first.row_id], [2], [1], [8])


def test_take_table_writes_replaces_a_block_known_before() -> None:
    rows = make_rows()
    row_id = add(rows, 1, num_blocks=3).row_id
    rows.take_table_writes([row_id])
    rows.shrink_table(row_id, 1)
    assert not rows.take_table_writes([])
    rows.extend_table(row_id, [9])
    assert columns(rows.take_table_writes([])) == ([row_id], [2], [1], [9])


def test_plan_work_samples_when_all_known_tokens_are_computed() -> None:
    rows = make_rows()
    first, second = add(rows, 1), add(rows, 2)
    work = plan(rows, [first, second], [6, 4], step_id=1)
    assert work.samples is not None
    assert work.samples.tolist() == [True, False]
    assert work.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert rows.num_tokens[[first.row_id, second.row_id]].tolist() == [7, 6]


def test_plan_work_refers_to_the_step_that_samples() -> None:
    rows = make_rows()
    decoding, prefilling = add(rows, 1), add(rows, 2)
    plan(rows, [decoding], [6], step_id=4)
    work = plan(rows, [decoding, prefilling], [1, 6], step_id=6)
    assert work.sampled_steps_back.tolist() == [2, 0]
    assert work.token_ids.tolist() == list(range(6))


def test_plan_work_sends_tokens_again_when_samples_are_forgotten() -> None:
    rows = make_rows()
    sequence = add(rows, 1)
    plan(rows, [sequence], [6], step_id=1)
    rows.token_ids[sequence.row_id, 6] = 30
    rows.num_known[sequence.row_id] = 7
    rows.forget_samples()
    work = plan(rows, [sequence], [1], step_id=2)
    assert (work.sampled_steps_back.tolist(), work.token_ids.tolist()) == ([0], [30])


def test_append_token_promises_nothing_when_it_is_known_at_once() -> None:
    rows = make_rows()
    sequence = add(rows, 1)
    rows.append_token(sequence.row_id, 33)
    assert rows.known_tokens(sequence.row_id).tolist() == [0, 1, 2, 3, 4, 5, 33]
    rows.remove(sequence)
    assert sequence.num_promised == 0
    assert sequence.status is SequenceStatus.RUNNING  # Whoever removes it says what it is now.


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


def test_add_keeps_the_removal_of_a_reused_row() -> None:
    draft = make_draft()
    draft.remove_row(3)
    draft.add_row(make_draft(3).new_rows[3])
    assert draft.removed_row_ids == [3]
    assert list(draft.new_rows) == [3]
