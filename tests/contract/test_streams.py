"""The rpcs around the steps: streams that are cut, superseded, oversize; the handshake."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_rpc import failure_of
from tests.contract.served import (
    BLOCK_SIZE,
    EXECUTOR_EPOCH,
    MAX_INFLIGHT_STEPS,
    MAX_MESSAGE_BYTES,
    PROMPT,
    SCHEDULER_EPOCH,
    Served,
)
from tests.support.steps.batches import WorkRow, tokens_of


async def test_older_stream_is_aborted_when_a_newer_one_sends(served: Served) -> None:
    older = served.open()
    await older.tokens(served.prompt_batch(1))
    newer = served.open()
    assert await newer.tokens(served.prompt_batch(2)) == served.truth(PROMPT)
    failure = failure_of(await older.end())
    assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "STREAM_SUPERSEDED")


async def test_newer_stream_is_refused_in_band_when_its_scheduler_is_older(
    served: Served,
) -> None:
    current = served.open()
    await current.tokens(served.prompt_batch(1))
    stale = served.prompt_batch(2)
    stale.scheduler_epoch -= 1
    result = await served.open().execute(stale)
    assert result.error.reason == pb.STEP_ERROR_REASON_STALE_SCHEDULER_EPOCH
    assert await current.tokens(served.prompt_batch(2)) == served.truth(PROMPT)


@pytest.mark.parametrize("epoch", [2**63 - 1, SCHEDULER_EPOCH + 1])
async def test_scheduler_goes_on_when_a_newer_one_is_refused(served: Served, epoch: int) -> None:
    current = served.open()
    await current.tokens(served.prompt_batch(1))
    empty = pb.ScheduleBatch(scheduler_epoch=epoch)
    mistaken = pb.ScheduleBatch(scheduler_epoch=epoch, executor_epoch=EXECUTOR_EPOCH)
    malformed = served.prompt_batch(2)
    malformed.scheduler_epoch, malformed.work.row_ids = epoch, b"1"
    delta = served.prompt_batch(2)
    delta.scheduler_epoch, delta.base_step_id = epoch, 1
    newer = served.open()
    for batch in (empty, mistaken, malformed, delta):
        result = await newer.execute(batch)
        assert result.status in (pb.STEP_STATUS_REFUSED, pb.STEP_STATUS_NEED_SNAPSHOT)
    next_batch = served.sender.batch(2, base=1, work=[WorkRow(0, len(PROMPT), back=1)])
    assert await current.tokens(next_batch) == served.truth(PROMPT, 2)[1:]


async def test_results_are_stored_when_the_stream_is_cut_mid_step(served: Served) -> None:
    served.gate.shut()
    cut = served.open()
    first = served.prompt_batch()
    second = served.sender.batch(2, base=1, work=[WorkRow(0, len(PROMPT), back=1)])
    await cut.send(first)
    await cut.send(second)
    await _received(served, 2)
    cut.call.cancel()
    reopened = served.open()
    await reopened.send(first)
    await reopened.send(second)
    served.gate.open()
    tokens = [*tokens_of(await reopened.receive()), *tokens_of(await reopened.receive())]
    assert (tokens, served.gate.num_steps) == (served.truth(PROMPT, 2), 2)


async def test_steps_go_on_when_a_superseded_stream_had_batches(
    served: Served,
) -> None:
    served.gate.shut()
    older = served.open()
    batch = served.prompt_batch()
    await older.send(batch)
    await _received(served, 1)
    newer = served.open()
    await newer.send(batch)
    served.gate.open()
    assert (tokens_of(await newer.receive()), served.gate.num_steps) == (served.truth(PROMPT), 1)


async def test_stream_ends_well_when_the_client_half_closes_it(
    served: Served,
) -> None:
    served.gate.shut()
    session = served.open()
    await session.send(served.prompt_batch())
    await session.call.done_writing()
    await _received(served, 1)
    # What the executor answers now it has read after the end of the batches.
    await served.stub.GetInfo(pb.GetInfoRequest())
    served.gate.open()
    assert tokens_of(await session.receive()) == served.truth(PROMPT)
    assert await session.call.read() is grpc.aio.EOF
    assert await session.call.code() == grpc.StatusCode.OK


async def test_stream_breaks_alone_when_a_message_is_too_large(served: Served) -> None:
    session = served.open()
    await session.tokens(served.prompt_batch(1))
    oversize = served.prompt_batch(2)
    oversize.work.token_ids = bytes(MAX_MESSAGE_BYTES)
    await session.send(oversize)
    assert (await session.end()).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await served.open().tokens(served.prompt_batch(2)) == served.truth(PROMPT)


async def test_event_loop_answers_when_a_step_takes_long(served: Served) -> None:
    served.gate.shut()
    session = served.open()
    await session.send(served.prompt_batch())
    await _received(served, 1)
    answer = await served.stub.GetInfo(pb.GetInfoRequest())
    assert answer.executor.executor_epoch == EXECUTOR_EPOCH
    served.gate.open()
    assert tokens_of(await session.receive()) == served.truth(PROMPT)


async def test_results_are_sent_when_the_executor_drains(served: Served) -> None:
    served.gate.shut()
    session = served.open()
    await session.send(served.prompt_batch())
    await _received(served, 1)
    draining = asyncio.create_task(served.server.servicer.drain())
    served.gate.open()
    assert tokens_of(await session.receive()) == served.truth(PROMPT)
    # This stream ends, and no other one begins.
    for each in (session, served.open()):
        failure = failure_of(await each.end())
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    await draining


@pytest.mark.parametrize("num_batches", [1, MAX_INFLIGHT_STEPS, 4 * MAX_INFLIGHT_STEPS])
async def test_results_come_in_order_when_batches_are_sent_ahead(
    served: Served, num_batches: int
) -> None:
    session = served.open()
    for step_id in range(1, num_batches + 1):
        await session.send(served.prompt_batch(step_id))
    results = [await session.receive() for _ in range(num_batches)]
    assert [result.step_id for result in results] == list(range(1, num_batches + 1))


async def test_info_says_what_was_registered(served: Served) -> None:
    info = (await served.stub.GetInfo(pb.GetInfoRequest())).executor
    version = info.contract_version
    assert (version.major, version.minor, list(info.features)) == (1, 10, [1, 2, 3, 4, 7])
    assert (info.address, info.block_size_tokens) == (served.server.info.address, BLOCK_SIZE)
    assert info.limits.max_inflight_steps == MAX_INFLIGHT_STEPS
    assert info.model.vocab_size == served.backend.vocab_size
    assert not info.model.HasField("sliding_window_tokens")


async def test_tokenizer_is_not_found_when_the_model_has_none(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in served.stub.GetTokenizer(pb.GetTokenizerRequest()):
            pass
    assert failure_of(caught.value).reason == "TOKENIZER_UNAVAILABLE"


async def _received(served: Served, num_batches: int) -> None:
    """Waits until the executor has read as many batches, the first of which waits at the gate."""
    assert await asyncio.to_thread(served.gate.entered.wait, 30)
    # Nothing tells a client that its batch was read, so this looks again in each turn of the loop.
    while served.server.worker.num_submitted < num_batches:  # noqa: ASYNC110
        await asyncio.sleep(0)
