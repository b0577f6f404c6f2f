"""Wrong batches are refused as a whole, with reason and field, and change nothing."""

from __future__ import annotations

import pytest

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.refusals import (
    CASES,
    CONSTRAINT_CASES,
    FEATURE_CASES,
    GRAMMAR_CASES,
    SEVERAL_CASES,
    UNANNOUNCED_CASES,
    WINDOW_CASES,
    Case,
)
from tests.contract.served import PROMPT, Served
from tests.support.steps.batches import NewRow, WorkRow, i32


# Whether a device is late makes no difference: nothing of such a batch comes to it. That answers
# keep their order all the same is shown in test_streams.
@pytest.mark.parametrize("backend", ["fake", "real"], indirect=True)
@pytest.mark.parametrize(
    "case",
    [*CASES, *CONSTRAINT_CASES, *UNANNOUNCED_CASES],
    ids=lambda case: case.name,
)
async def test_batch_changes_nothing_when_it_is_refused(served: Served, case: Case) -> None:
    await _check_refused(served, case)


@pytest.mark.parametrize(
    "case", [*FEATURE_CASES, *GRAMMAR_CASES, *SEVERAL_CASES], ids=lambda case: case.name
)
async def test_batch_changes_nothing_when_it_uses_a_feature_wrongly(
    served_all: Served, case: Case
) -> None:
    await _check_refused(served_all, case)


@pytest.mark.parametrize("case", WINDOW_CASES, ids=lambda case: case.name)
async def test_batch_changes_nothing_when_a_block_in_sight_is_missing(
    served_window: Served, case: Case
) -> None:
    await _check_refused(served_window, case)


async def _check_refused(served: Served, case: Case) -> None:
    session = served.open()
    prepared = served.sender.batch(
        1,
        new=[NewRow(0, (0, 1, 2), num_prompt=len(PROMPT)), NewRow(1, (10,))],
        work=[WorkRow(0, 0, PROMPT), WorkRow(1, 0, [8])],
    )
    first, _ = await session.tokens(prepared)
    result = await session.execute(case.make(served.sender))
    reason = pb.StepErrorReason.Name(result.error.reason).removeprefix("STEP_ERROR_REASON_")
    assert (result.status, reason, result.error.field, served.gate.num_steps) == (
        pb.STEP_STATUS_REFUSED,
        case.reason,
        case.field,
        1,
    ), result.error.message
    # Row 0 is as it was, and so are its blocks and L; rows 2 and 3 were not added.
    after = served.sender.batch(
        2,
        base=1,
        new=[NewRow(2, (20,)), NewRow(3, (21,))],
        work=[WorkRow(0, len(PROMPT), [first]), WorkRow(2, 0, [9])],
    )
    assert await session.tokens(after) == [*served.truth([*PROMPT, first]), *served.truth([9])]


async def test_batch_is_refused_when_step_id_is_0(served: Served) -> None:
    result = await served.open().execute(served.prompt_batch(0))
    assert (result.error.reason, result.error.field) == (
        pb.STEP_ERROR_REASON_MALFORMED,
        "step_id",
    )


async def test_offsets_may_be_one_zero_when_there_are_no_rows(served: Served) -> None:
    batch = served.sender.batch(1)
    batch.new_rows.block_offsets = i32([0])
    batch.table_writes.block_offsets = i32([0])
    assert (await served.open().execute(batch)).status == pb.STEP_STATUS_OK


async def test_refusal_says_the_range_when_a_block_is_outside(
    served: Served,
) -> None:
    batch = served.sender.batch(1, new=[NewRow(0, (3, 77))])
    result = await served.open().execute(batch)
    assert result.error.message == "element 1 is 77; allowed: 0 .. 31"
