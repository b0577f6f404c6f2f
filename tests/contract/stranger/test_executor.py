"""The stranger executor itself: it computes what it is sent, and refuses what is wrong."""

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc as pb_grpc
from tests.contract.refusals import CASES, SEVERAL_CASES, UNANNOUNCED_CASES, Case
from tests.contract.served import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_ROWS,
    NUM_DEVICE_BLOCKS,
    NUM_HOST_BLOCKS,
    VOCAB_SIZE,
)
from tests.contract.stranger.columns import read_i32
from tests.contract.stranger.engine import Engine, Faults
from tests.contract.stranger.executor import (
    ALL_SAMPLING,
    SAMPLING_FEATURES,
    ExecutorConfig,
    StrangerExecutor,
)
from tests.contract.stranger.truth import expected_tokens
from tests.support.steps.batches import NewRow, Sender, WorkRow

PROMPT = [11, 12, 13, 14, 15, 16]
LENGTH = len(PROMPT)
SEED = -5
ROW = NewRow(0, (5, 3, 4), LENGTH, {"temperature": 0.5}, SEED)


def make_engine(faults: Faults | None = None, **config: Any) -> tuple[Engine, Sender]:  # noqa: ANN401
    info = StrangerExecutor(ExecutorConfig(**config))._describe()
    return Engine(info, faults or Faults()), Sender(1000, info.executor_epoch)


def prefill(sender: Sender, drafts: Sequence[int] = ()) -> pb.ScheduleBatch:
    return sender.batch(1, new=[ROW], work=[WorkRow(0, 0, PROMPT, drafts=drafts)])


def decode(sender: Sender, step_id: int, position: int, back: int = 1) -> pb.ScheduleBatch:
    return sender.batch(step_id, base=step_id - 1, work=[WorkRow(0, position, back=back)])


def tokens_of(*results: pb.StepResult) -> list[int]:
    return [read_i32(result.sampled_token_ids, "")[0] for result in results]


def truth(n: int) -> list[int]:
    return expected_tokens(PROMPT, SEED, 0.5, n)


def test_engine_samples_expected_tokens_when_steps_are_pipelined() -> None:
    engine, sender = make_engine(max_inflight_steps=5)
    first = sender.batch(1, new=[ROW], work=[WorkRow(0, 0, PROMPT[:4], samples=False)])
    engine.handle(first)
    second = sender.batch(2, base=1, work=[WorkRow(0, 4, PROMPT[4:])])
    results = [engine.handle(second)]
    results += [engine.handle(decode(sender, 3 + i, LENGTH + i)) for i in range(4)]
    assert tokens_of(*results) == truth(5)
    # The last results are stored; others have been forgotten.
    assert engine.handle(second) == results[0]
    assert engine.violations == []
    assert engine.handle(first).error.reason == pb.STEP_ERROR_REASON_STALE_STEP


def test_engine_needs_snapshot_when_base_is_not_last_applied() -> None:
    engine, sender = make_engine()
    assert engine.handle(decode(sender, 2, 6)).status == pb.STEP_STATUS_NEED_SNAPSHOT
    engine.handle(prefill(sender))
    assert engine.handle(decode(sender, 3, 6)).status == pb.STEP_STATUS_NEED_SNAPSHOT


def test_engine_marks_row_when_its_input_is_not_there() -> None:
    engine, sender = make_engine()
    unwritten = sender.batch(1, new=[ROW], work=[WorkRow(0, 4, PROMPT[4:])])
    assert list(engine.handle(unwritten).row_statuses) == [pb.ROW_STATUS_INVALID_LOGITS]
    engine, sender = make_engine()
    engine.handle(prefill(sender))
    unsampled = decode(sender, 2, 6, back=2)
    assert list(engine.handle(unsampled).row_statuses) == [pb.ROW_STATUS_INPUT_UNAVAILABLE]


def test_engine_marks_rows_when_step_before_failed() -> None:
    engine, sender = make_engine(Faults(fail_step_at=2))
    engine.handle(prefill(sender))
    assert engine.handle(decode(sender, 2, 6)).status == pb.STEP_STATUS_FAILED
    result = engine.handle(sender.batch(3, base=2, work=[WorkRow(0, 6, truth(1))]))
    assert list(result.row_statuses) == [pb.ROW_STATUS_INVALID_LOGITS]
    assert engine.violations == []


@pytest.mark.parametrize("num_right", range(4))
def test_engine_takes_drafts_as_long_as_they_are_right(num_right: int) -> None:
    engine, sender = make_engine(features=ALL_SAMPLING)
    drafts = truth(3)
    if num_right < 3:
        drafts[num_right] += 1
    result = engine.handle(prefill(sender, drafts))
    assert read_i32(result.sampled_token_ids, "") == truth(num_right + 1)
    # The latest position that the row can have, as far as a sender without the result knows.
    after = engine.handle(decode(sender, 2, LENGTH + 3))
    assert tokens_of(after) == truth(num_right + 2)[-1:]
    assert engine.violations == []


# All but ranges of sampling params, which no scheduler computes.
REFUSED = [
    case
    for case in [*CASES, *UNANNOUNCED_CASES, *SEVERAL_CASES]
    if not case.field.startswith("new_rows.sampling_params[")
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_engine_changes_nothing_when_batch_is_refused(case: Case) -> None:
    engine, sender = make_engine(
        vocab_size=VOCAB_SIZE,
        num_device_blocks=NUM_DEVICE_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        max_num_rows=MAX_NUM_ROWS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        features=ALL_SAMPLING if case in SEVERAL_CASES else SAMPLING_FEATURES,
    )
    new = [NewRow(0, (0, 1, 2), LENGTH), NewRow(1, (10,))]
    work = [WorkRow(0, 0, PROMPT), WorkRow(1, 0, [8])]
    assert engine.handle(sender.batch(1, new=new, work=work)).status == pb.STEP_STATUS_OK
    assert engine.handle(case.make(sender)).status == pb.STEP_STATUS_REFUSED
    assert len(engine.violations) == 1
    result = engine.handle(decode(sender, 2, LENGTH))
    assert (result.status, result.row_statuses) == (pb.STEP_STATUS_OK, b"")


@pytest.mark.parametrize(("name", "epoch"), [("executor_epoch", 1), ("scheduler_epoch", 9)])
def test_engine_refuses_when_an_epoch_is_not_its_own(name: str, epoch: int) -> None:
    engine, sender = make_engine()
    engine.handle(prefill(sender))
    batch = decode(sender, 2, 6)
    setattr(batch, name, epoch)
    assert engine.handle(batch).error.field == name


async def test_executor_aborts_a_stream_when_a_newer_one_sends() -> None:
    executor = StrangerExecutor()
    await executor.start()
    sender = Sender(1000, executor.info.executor_epoch)
    try:
        async with grpc.aio.insecure_channel(executor.info.address) as channel:
            stub = pb_grpc.ExecutorServiceStub(channel)
            older = stub.Execute()
            await older.write(prefill(sender))
            first = await older.read()
            newer = stub.Execute()
            await newer.write(decode(sender, 2, 6))
            second = await newer.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await older.read()
            newer.cancel()
    finally:
        await executor.close()
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert tokens_of(first, second) == truth(2)
