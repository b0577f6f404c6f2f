"""Owners of rows are those that the rows say, one by one, whatever came and went in between."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.scheduler.engine.row_columns import RowColumns
from scheduler_service.scheduler.values.plan import NewRow
from scheduler_service.scheduler.values.request import Request
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from scheduler_service.watching.live_steps import RowOwners

NUM_ROWS = 4
EMPTY = np.empty(0, np.int32)


@given(st.lists(st.tuples(st.integers(0, NUM_ROWS), st.booleans()), max_size=40))
def test_owners_are_those_of_each_row_when_rows_have_changed_hands(
    events: list[tuple[int, bool]],
) -> None:
    rows = RowColumns(NUM_ROWS, 64, 16, 4)
    owners, running, before = RowOwners(rows), list[Request](), set[int]()
    for number, (which, looks) in enumerate(events, 1):
        if which < len(running):
            rows.remove(running.pop(which).sequence)
        elif rows.num_free:
            prompt = [1] * (number % 7 + 1)
            request = Request.create(f"r{number}", prompt, SamplingParams(), arrival=number, seed=1)
            rows.add(request.sequence, (number,), 0)
            running.append(request)
        if looks:
            given_out, copy = owners.now, owners.now.copy()
            found = {request.arrival for request in owners.refresh()}
            now = {request.arrival for request in running}
            assert found == now - before
            before = now
            assert (given_out == copy).all()
            for request in running:
                number_of, num_prompt = owners.now[:, request.sequence.row_id].tolist()
                assert number_of == request.arrival
                assert num_prompt == request.sequence.num_prompt_tokens


def test_owners_are_those_of_each_plan_when_a_row_changes_hands_in_the_same_turn() -> None:
    rows = RowColumns(NUM_ROWS, 64, 16, 4)
    owners = RowOwners(rows)
    seen = []
    for number in (1, 2):
        prompt = [1] * number
        request = Request.create(f"r{number}", prompt, SamplingParams(), arrival=number, seed=1)
        owners.take([NewRow(request.sequence, 0, EMPTY, EMPTY)])
        seen.append(owners.now)

    assert [now[:, 0].tolist() for now in seen] == [[1, 1], [2, 2]]
