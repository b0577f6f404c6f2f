"""Identity rules a to e: which batches are taken, which are answered from memory or refused."""

from __future__ import annotations

import time
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
from tests.support.steps.batches import NewRow, WorkRow


async def test_batch_is_refused_when_it_is_meant_for_another_executor_epoch(
    served: Served,
) -> None:
    batch = served.prompt_batch()
    batch.executor_epoch += 1
    result = await served.open().execute(batch)
    assert (result.status, result.error.reason, result.executor_epoch) == (
        pb.STEP_STATUS_REFUSED,
        pb.STEP_ERROR_REASON_WRONG_EXECUTOR_EPOCH,
        EXECUTOR_EPOCH,
    )


async def test_newer_scheduler_is_not_adopted_when_executor_epoch_is_wrong(
    served: Served,
) -> None:
    session = served.open()
    batch = served.prompt_batch()
    batch.executor_epoch += 1
    batch.scheduler_epoch += 5
    await session.execute(batch)
    assert await session.tokens(served.prompt_batch()) == served.truth(PROMPT)


async def test_batch_is_refused_when_its_scheduler_is_older(served: Served) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch())
    served.sender = replace(served.sender, scheduler_epoch=SCHEDULER_EPOCH - 1)
    result = await session.execute(served.prompt_batch(2))
    assert (result.status, result.error.reason, result.scheduler_epoch) == (
        pb.STEP_STATUS_REFUSED,
        pb.STEP_ERROR_REASON_STALE_SCHEDULER_EPOCH,
        SCHEDULER_EPOCH - 1,
    )


async def test_scheduler_is_refused_by_name_when_its_epoch_lies_in_the_future(
    served: Served,
) -> None:
    batch = served.prompt_batch()
    batch.scheduler_epoch = time.time_ns() + 2 * 3600 * 10**9
    result = await served.open().execute(batch)
    assert (result.status, result.error.reason, result.error.field) == (
        pb.STEP_STATUS_REFUSED,
        pb.STEP_ERROR_REASON_FUTURE_SCHEDULER_EPOCH,
        "scheduler_epoch",
    )


async def test_scheduler_is_taken_when_its_clock_is_a_little_ahead(served: Served) -> None:
    batch = served.prompt_batch()
    batch.scheduler_epoch = time.time_ns() + 60 * 10**9
    assert await served.open().tokens(batch) == served.truth(PROMPT)


async def test_epoch_from_the_future_is_not_adopted_when_registration_brings_it(
    served: Served,
) -> None:
    served.server.worker.adopt_scheduler_epoch(2**63 - 1)
    assert await served.open().tokens(served.prompt_batch()) == served.truth(PROMPT)


async def test_stored_result_is_forgotten_when_scheduler_is_newer(served: Served) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch())
    served.sender = replace(served.sender, scheduler_epoch=SCHEDULER_EPOCH + 1)
    other = [30, 31, 32]
    batch = served.sender.batch(1, new=[NewRow(0, (0,))], work=[WorkRow(0, 0, other)])
    assert await session.tokens(batch) == served.truth(other)


async def test_repeat_is_refused_when_the_result_was_an_older_schedulers(served: Served) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch(1))
    served.sender = replace(served.sender, scheduler_epoch=SCHEDULER_EPOCH + 1)
    await session.tokens(served.prompt_batch(2))
    result = await session.execute(served.prompt_batch(1))
    assert result.error.reason == pb.STEP_ERROR_REASON_STALE_STEP


async def test_delta_needs_snapshot_when_scheduler_is_newer(served: Served) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch())
    served.sender = replace(served.sender, scheduler_epoch=SCHEDULER_EPOCH + 1)
    result = await session.execute(served.sender.batch(2, base=1))
    assert result.status == pb.STEP_STATUS_NEED_SNAPSHOT


async def test_older_scheduler_is_refused_when_a_newer_one_answered_registration(
    served: Served,
) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch())
    served.server.worker.adopt_scheduler_epoch(SCHEDULER_EPOCH + 1)
    result = await session.execute(served.sender.batch(2, base=1))
    assert result.error.reason == pb.STEP_ERROR_REASON_STALE_SCHEDULER_EPOCH


async def test_rows_survive_when_the_same_scheduler_answers_registration(served: Served) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch())
    served.server.worker.adopt_scheduler_epoch(SCHEDULER_EPOCH)
    result = await session.execute(served.sender.batch(2, base=1))
    assert result.status == pb.STEP_STATUS_OK


async def test_repeat_returns_stored_result_when_step_was_executed(served: Served) -> None:
    session = served.open()
    first = await session.execute(served.prompt_batch())
    again = await session.execute(served.prompt_batch())
    assert (again, served.gate.num_steps) == (first, 1)


async def test_repeat_returns_stored_result_when_its_content_is_broken(served: Served) -> None:
    session = served.open()
    first = await session.execute(served.prompt_batch())
    repeat = served.prompt_batch()
    repeat.work.row_ids = b"\1"
    assert await session.execute(repeat) == first


async def test_repeat_returns_stored_result_when_step_failed(served: Served) -> None:
    session = served.open()
    batch = served.sender.batch(
        1, new=[NewRow(0, (0,))], work=[WorkRow(0, 0, [OUT_OF_MEMORY_TOKEN])]
    )
    first = await session.execute(batch)
    assert first.status == pb.STEP_STATUS_FAILED
    again = await session.execute(batch)
    assert (again, served.gate.num_steps) == (first, 1)


async def test_all_results_are_stored_when_as_many_as_may_be_in_flight(served: Served) -> None:
    session = served.open()
    batches = [served.prompt_batch(step_id) for step_id in range(1, MAX_INFLIGHT_STEPS + 1)]
    first = [await session.execute(batch) for batch in batches]
    assert [await session.execute(batch) for batch in batches] == first


async def test_repeat_is_refused_when_its_result_is_no_longer_stored(served: Served) -> None:
    session = served.open()
    for step_id in range(1, 40):
        await session.tokens(served.prompt_batch(step_id))
    result = await session.execute(served.prompt_batch(1))
    assert (result.status, result.error.reason) == (
        pb.STEP_STATUS_REFUSED,
        pb.STEP_ERROR_REASON_STALE_STEP,
    )


async def test_delta_needs_snapshot_when_there_was_no_step(served: Served) -> None:
    result = await served.open().execute(served.sender.batch(5, base=4))
    assert (result.status, result.error.reason, result.step_id) == (
        pb.STEP_STATUS_NEED_SNAPSHOT,
        pb.STEP_ERROR_REASON_UNSPECIFIED,
        5,
    )


@pytest.mark.parametrize("base", [1, 3])
async def test_delta_needs_snapshot_when_base_is_not_the_latest_step(
    served: Served, base: int
) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch(1))
    await session.tokens(served.prompt_batch(2))
    result = await session.execute(served.sender.batch(4, base=base))
    assert result.status == pb.STEP_STATUS_NEED_SNAPSHOT


async def test_base_stays_when_a_batch_needed_a_snapshot(served: Served) -> None:
    session = served.open()
    [first] = await session.tokens(served.prompt_batch())
    assert (await session.execute(served.sender.batch(3, base=2))).status == (
        pb.STEP_STATUS_NEED_SNAPSHOT
    )
    batch = served.sender.batch(4, base=1, work=[WorkRow(0, len(PROMPT), [first])])
    assert await session.tokens(batch) == served.truth([*PROMPT, first])


async def test_snapshot_is_taken_when_it_skips_step_ids(served: Served) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch(1))
    assert await session.tokens(served.prompt_batch(7)) == served.truth(PROMPT)


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


async def test_result_names_its_batch_when_it_is_ok(served: Served) -> None:
    result = await served.open().execute(served.prompt_batch(9))
    assert (result.scheduler_epoch, result.executor_epoch, result.step_id) == (
        SCHEDULER_EPOCH,
        EXECUTOR_EPOCH,
        9,
    )
