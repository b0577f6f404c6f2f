"""Parts of results: tokens of rows that run on, before the step is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from executor_service.steps import StepInput
from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.served import PROMPT, Served, Session
from tests.support.fakes.fake_runner import FakeRunner, StepFault
from tests.support.processes.patience import PATIENCE_S
from tests.support.steps.batches import NewRow, WorkRow, read_i32, runs_of

NUM_PROMPT = len(PROMPT)
OTHER = [80, 3, 3, 51, 29]
NEW = [NewRow(0, (3, 9, 1, 12, 7, 20), NUM_PROMPT), NewRow(1, (10, 11, 13), len(OTHER))]
RUN_ON = 15


def running(served: Served, *, reports_parts: bool = True) -> pb.ScheduleBatch:
    """Step 1: row 1 samples one token, row 0 runs on."""
    work = [WorkRow(1, 0, OTHER), WorkRow(0, 0, PROMPT, run_on=RUN_ON)]
    batch = served.sender.batch(1, new=NEW, work=work)
    batch.work.reports_parts = reports_parts
    return batch


def next_step(served: Served) -> pb.ScheduleBatch:
    """Step 2: row 0 from the largest position at which step 1 can leave it, with no parts."""
    work = [WorkRow(0, NUM_PROMPT + RUN_ON, back=1, run_on=1)]
    return served.sender.batch(2, base=1, work=work)


async def receive_all(session: Session) -> tuple[list[pb.StepResult], pb.StepResult]:
    """The parts up to the next result, and the result."""
    parts = []
    while (result := await session.receive()).status == pb.STEP_STATUS_PARTIAL:
        parts.append(result)
    return parts, result


def joined(parts: Sequence[pb.StepResult]) -> list[list[int]]:
    """Tokens of both rows in all parts."""
    rows: list[list[int]] = [[], []]
    for part in parts:
        tokens = read_i32(part.sampled_token_ids)
        start, middle, end = read_i32(part.sampled_offsets)
        assert (start, end) == (0, len(tokens))
        assert tokens, "a part has tokens"
        rows[0] += tokens[:middle]
        rows[1] += tokens[middle:]
    return rows


async def test_parts_come_before_the_result_and_begin_its_tokens(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    await session.send(running(served))
    parts, result = await receive_all(session)
    expected = [served.truth(OTHER), served.truth(PROMPT, RUN_ON + 1)]
    assert runs_of(result) == expected
    assert joined(parts[:1]) == [expected[0], expected[1][:1]]
    assert [expected[row][: len(tokens)] for row, tokens in enumerate(joined(parts))] == joined(
        parts
    )
    ids = {(part.scheduler_epoch, part.executor_epoch, part.step_id) for part in parts}
    assert ids == {(result.scheduler_epoch, result.executor_epoch, 1)}
    # A repeat is answered from the store, without parts.
    assert await session.execute(running(served)) == result


async def test_no_parts_come_when_the_step_does_not_ask_for_them(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    await session.send(running(served, reports_parts=False))
    await session.send(next_step(served))
    expected = served.truth(PROMPT, RUN_ON + 3)
    assert runs_of(await session.receive()) == [served.truth(OTHER), expected[: RUN_ON + 1]]
    assert runs_of(await session.receive()) == [expected[RUN_ON + 1 :]]


async def test_tokens_are_right_whenever_the_next_batch_comes(served_several: Served) -> None:
    session, served = served_several.open(), served_several
    await session.send(running(served))
    first = await session.receive()
    await session.send(next_step(served))
    parts, result = await receive_all(session)
    other, tokens = runs_of(result)
    expected = served.truth(PROMPT, RUN_ON + 3)
    assert other == served.truth(OTHER)
    assert tokens == expected[: len(tokens)]
    begun = joined([first, *parts])[1]
    assert begun == expected[: len(begun)]
    assert len(begun) <= len(tokens)
    after = await session.receive()
    assert runs_of(after) == [expected[len(tokens) :][:2]]


def hold_second_turn(served: Served) -> threading.Event:
    """Lets the fake runner begin its second turn when the returned event is set."""
    runner, may_go_on = served.backend.runner, threading.Event()
    assert isinstance(runner, FakeRunner)

    def waits(_step: StepInput) -> StepFault:
        assert len(runner.steps) != 2 or may_go_on.wait(PATIENCE_S)
        return StepFault()

    runner.fault = waits
    return may_go_on


@pytest.mark.parametrize("served_several", ["fake"], indirect=True)
async def test_run_ends_after_the_token_under_way_when_a_batch_comes(
    served_several: Served,
) -> None:
    session, served = served_several.open(), served_several
    may_go_on = hold_second_turn(served)
    await session.send(running(served))
    parts = [await session.receive()]
    await session.send(next_step(served))
    while served.server.worker.num_submitted < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    may_go_on.set()
    expected = served.truth(PROMPT, 4)
    assert joined(parts) == [served.truth(OTHER), expected[:1]]
    assert runs_of(await session.receive()) == [served.truth(OTHER), expected[:2]]
    assert runs_of(await session.receive()) == [expected[2:]]


@pytest.mark.parametrize("served_several", ["fake"], indirect=True)
async def test_result_is_stored_whole_when_the_stream_breaks_after_a_part(
    served_several: Served,
) -> None:
    session, served = served_several.open(), served_several
    may_go_on = hold_second_turn(served)
    await session.send(running(served))
    assert (await session.receive()).status == pb.STEP_STATUS_PARTIAL
    session.call.cancel()
    await served.server.servicer.streams.wait_none_open()
    may_go_on.set()
    while served.server.worker.num_in_flight:  # noqa: ASYNC110
        await asyncio.sleep(0)
    result = await served.open().execute(running(served))
    assert runs_of(result) == [served.truth(OTHER), served.truth(PROMPT, RUN_ON + 1)]
