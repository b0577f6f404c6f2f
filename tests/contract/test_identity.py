"""Identity rules a to e: which batches are taken, answered from memory or refused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.served import (
    EXECUTOR_EPOCH,
    MAX_INFLIGHT_STEPS,
    OUT_OF_MEMORY_TOKEN,
    PROMPT,
    SCHEDULER_EPOCH,
    Served,
)
from tests.support.steps.batches import NewRow, Sender, WorkRow

NEWER, OLDER = SCHEDULER_EPOCH + 1, SCHEDULER_EPOCH - 1
NOW, MINUTE = time.time_ns(), 60 * 10**9


def step(
    step_id: int,
    epoch: int = SCHEDULER_EPOCH,
    *,
    base: int | None = None,
    executor_epoch: int = EXECUTOR_EPOCH,
) -> pb.ScheduleBatch:
    """A snapshot that computes PROMPT in row 0; with `base` a delta without work."""
    if base is not None:
        return Sender(epoch, executor_epoch).batch(step_id, base=base)
    new, work = [NewRow(0, (0, 1, 2), len(PROMPT))], [WorkRow(0, 0, PROMPT)]
    return Sender(epoch, executor_epoch).batch(step_id, new=new, work=work)


# Earlier batches, a batch, and the reason why it is refused, NEED_SNAPSHOT, or OK.
CASES: list[tuple[Sequence[pb.ScheduleBatch], pb.ScheduleBatch, str]] = [
    ([], step(9), "OK"),
    ([], step(1, NOW + MINUTE), "OK"),
    ([step(1)], step(7), "OK"),
    ([step(1)], step(1, NEWER), "OK"),
    ([], step(1, executor_epoch=EXECUTOR_EPOCH + 1), "WRONG_EXECUTOR_EPOCH"),
    ([step(1)], step(2, OLDER), "STALE_SCHEDULER_EPOCH"),
    ([], step(1, NOW + 120 * MINUTE), "FUTURE_SCHEDULER_EPOCH"),
    ([step(1), step(2, NEWER)], step(1, NEWER), "STALE_STEP"),
    ([step(step_id) for step_id in range(1, 40)], step(1), "STALE_STEP"),
    ([], step(5, base=4), "NEED_SNAPSHOT"),
    ([step(1)], step(2, NEWER, base=1), "NEED_SNAPSHOT"),
    ([step(1), step(2)], step(4, base=1), "NEED_SNAPSHOT"),
    ([step(1), step(2)], step(4, base=3), "NEED_SNAPSHOT"),
]


@pytest.mark.parametrize(("before", "batch", "outcome"), CASES)
async def test_batch_is_taken_or_refused_by_its_identity(
    served: Served, before: Sequence[pb.ScheduleBatch], batch: pb.ScheduleBatch, outcome: str
) -> None:
    session = served.open()
    for each in before:
        await session.tokens(each)
    result = await session.execute(batch)
    reason = pb.StepErrorReason.Name(result.error.reason).removeprefix("STEP_ERROR_REASON_")
    status = pb.StepStatus.Name(result.status).removeprefix("STEP_STATUS_")
    assert (status, reason) == (
        (outcome, "UNSPECIFIED") if outcome in ("OK", "NEED_SNAPSHOT") else ("REFUSED", outcome)
    )
    assert (result.executor_epoch, result.scheduler_epoch, result.step_id) == (
        EXECUTOR_EPOCH,
        batch.scheduler_epoch,
        batch.step_id,
    )
    if reason == "FUTURE_SCHEDULER_EPOCH":
        assert result.error.field == "scheduler_epoch"


async def test_newer_scheduler_is_not_adopted_when_executor_epoch_is_wrong(
    served: Served,
) -> None:
    session = served.open()
    await session.execute(step(1, NEWER, executor_epoch=EXECUTOR_EPOCH + 1))
    assert await session.tokens(step(1)) == served.truth(PROMPT)


async def test_registration_brings_no_epoch_from_the_future(
    served: Served,
) -> None:
    served.server.worker.adopt_scheduler_epoch(2**63 - 1)
    assert await served.open().tokens(served.prompt_batch()) == served.truth(PROMPT)


async def test_stored_result_is_forgotten_when_scheduler_is_newer(served: Served) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch())
    served.sender = replace(served.sender, scheduler_epoch=NEWER)
    other = [30, 31, 32]
    batch = served.sender.batch(1, new=[NewRow(0, (0,))], work=[WorkRow(0, 0, other)])
    assert await session.tokens(batch) == served.truth(other)


async def test_older_scheduler_is_refused_when_a_newer_one_answered_registration(
    served: Served,
) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch())
    served.server.worker.adopt_scheduler_epoch(NEWER)
    result = await session.execute(served.sender.batch(2, base=1))
    assert result.error.reason == pb.STEP_ERROR_REASON_STALE_SCHEDULER_EPOCH


async def test_rows_survive_when_the_same_scheduler_answers_registration(served: Served) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch())
    served.server.worker.adopt_scheduler_epoch(SCHEDULER_EPOCH)
    result = await session.execute(served.sender.batch(2, base=1))
    assert result.status == pb.STEP_STATUS_OK


@pytest.mark.parametrize("token", [PROMPT[0], OUT_OF_MEMORY_TOKEN])
async def test_repeat_returns_stored_result_when_step_was_executed(
    served: Served, token: int
) -> None:
    session = served.open()
    batch = served.sender.batch(1, new=[NewRow(0, (0,))], work=[WorkRow(0, 0, [token])])
    first = await session.execute(batch)
    is_failed = token == OUT_OF_MEMORY_TOKEN
    assert first.status == (pb.STEP_STATUS_FAILED if is_failed else pb.STEP_STATUS_OK)
    assert (await session.execute(batch), served.gate.num_steps) == (first, 1)
    # The content does not matter.
    batch.work.row_ids = b"\1"
    assert await session.execute(batch) == first


async def test_results_are_stored_for_all_steps_in_flight(served: Served) -> None:
    session = served.open()
    batches = [served.prompt_batch(step_id) for step_id in range(1, MAX_INFLIGHT_STEPS + 1)]
    first = [await session.execute(batch) for batch in batches]
    assert [await session.execute(batch) for batch in batches] == first


async def test_base_stays_when_a_batch_needed_a_snapshot(served: Served) -> None:
    session = served.open()
    [first] = await session.tokens(served.prompt_batch())
    assert (await session.execute(served.sender.batch(3, base=2))).status == (
        pb.STEP_STATUS_NEED_SNAPSHOT
    )
    batch = served.sender.batch(4, base=1, work=[WorkRow(0, len(PROMPT), [first])])
    assert await session.tokens(batch) == served.truth([*PROMPT, first])


async def test_snapshot_forgets_rows_when_they_are_not_in_it(served: Served) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch(1, row_id=4))
    await session.tokens(served.prompt_batch(2, row_id=0))
    result = await session.execute(
        served.sender.batch(3, base=2, work=[WorkRow(4, len(PROMPT), [1])])
    )
    assert result.error.reason == pb.STEP_ERROR_REASON_ROW_UNKNOWN


async def test_snapshot_keeps_blocks_when_it_says_nothing_of_them(served: Served) -> None:
    session = served.open()
    [first] = await session.tokens(served.prompt_batch())
    batch = served.sender.batch(2, new=[NewRow(6, (0, 1))], work=[WorkRow(6, len(PROMPT), [first])])
    assert await session.tokens(batch) == served.truth([*PROMPT, first])


async def test_rows_are_changed_when_the_step_failed(served: Served) -> None:
    session = served.open()
    new = [NewRow(0, (0, 1)), NewRow(1, (5,))]
    failing = served.sender.batch(1, new=new, work=[WorkRow(1, 0, [OUT_OF_MEMORY_TOKEN])])
    assert (await session.execute(failing)).status == pb.STEP_STATUS_FAILED
    batch = served.sender.batch(2, base=1, work=[WorkRow(0, 0, PROMPT)])
    assert await session.tokens(batch) == served.truth(PROMPT)


async def test_step_fails_whole_when_memory_runs_out(served: Served) -> None:
    session = served.open()
    new = [NewRow(0, (0, 1)), NewRow(1, (5,))]
    work = [WorkRow(0, 0, PROMPT), WorkRow(1, 0, [OUT_OF_MEMORY_TOKEN])]
    result = await session.execute(served.sender.batch(1, new=new, work=work))
    assert (result.status, result.error.reason, result.sampled_token_ids, result.row_statuses) == (
        pb.STEP_STATUS_FAILED,
        pb.STEP_ERROR_REASON_OUT_OF_MEMORY,
        b"",
        b"",
    )
