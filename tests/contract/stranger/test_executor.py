"""The stranger executor itself, against a driver written from the same comments."""

from collections.abc import Callable

import grpc
import pytest

from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc as pb_grpc
from tests.contract.stranger.columns import i32, i64, read_i32
from tests.contract.stranger.engine import Engine, StepFaults
from tests.contract.stranger.executor import ExecutorConfig, StrangerExecutor, expected_tokens

PROMPT = [11, 12, 13, 14, 15, 16]
SEED = -5


class Driver:
    """Writes the batches of one row with prompt PROMPT."""

    def __init__(self, info: pb.ExecutorInfo) -> None:
        self.info = info
        self.scheduler_epoch = 1000

    def batch(self, step_id: int, base: int | None = None) -> pb.ScheduleBatch:
        return pb.ScheduleBatch(
            scheduler_epoch=self.scheduler_epoch,
            executor_epoch=self.info.executor_epoch,
            step_id=step_id,
            base_step_id=base,
        )

    def add_row(self, batch: pb.ScheduleBatch, row_id: int = 0) -> pb.ScheduleBatch:
        batch.new_rows.CopyFrom(
            pb.NewRows(
                row_ids=i32([row_id]),
                sampling_params_indexes=i32([0]),
                seeds=i64([SEED]),
                num_prompt_tokens=i32([len(PROMPT)]),
                block_offsets=i32([0, 3]),
                block_ids=i32([5, 3, 4]),
                history_offsets=i32([0, 0]),
                sampling_params=[pb.SamplingParams(temperature=0.5)],
            )
        )
        return batch

    def prefill(self, step_id: int = 1, base: int | None = None) -> pb.ScheduleBatch:
        batch = self.add_row(self.batch(step_id, base))
        return self.compute(batch, 0, PROMPT)

    def compute(
        self, batch: pb.ScheduleBatch, position: int, tokens: list[int], row_id: int = 0
    ) -> pb.ScheduleBatch:
        batch.work.row_ids = i32([row_id])
        batch.work.num_computed_tokens = i32([position])
        batch.work.num_new_tokens = i32([len(tokens)])
        batch.work.token_ids = i32(tokens)
        return batch

    def decode(self, step_id: int, position: int, steps_back: int = 1) -> pb.ScheduleBatch:
        batch = self.batch(step_id, base=step_id - 1)
        self.compute(batch, position, [0])
        batch.work.token_ids = b""
        batch.work.sampled_steps_back = i32([steps_back])
        return batch


def make_engine(faults: StepFaults | None = None, **config: int) -> tuple[Engine, Driver]:
    described = StrangerExecutor(ExecutorConfig(**config, features=()))._describe()  # type: ignore[arg-type]
    return Engine(described, faults or StepFaults()), Driver(described)


def tokens_of(*results: pb.StepResult) -> list[int]:
    return [read_i32(result.sampled_token_ids, "")[0] for result in results]


def truth(n: int) -> list[int]:
    return expected_tokens(PROMPT, SEED, 0.5, n, 1000)


def test_engine_samples_expected_tokens_when_steps_are_pipelined() -> None:
    engine, driver = make_engine()
    results = [engine.handle(driver.prefill())]
    results += [engine.handle(driver.decode(2 + i, len(PROMPT) + i)) for i in range(4)]
    assert tokens_of(*results) == truth(5)
    assert engine.violations == []


def test_engine_samples_expected_tokens_when_prompt_is_chunked() -> None:
    engine, driver = make_engine()
    first = driver.compute(driver.add_row(driver.batch(1)), 0, PROMPT[:4])
    first.work.samples = b"\x00"
    engine.handle(first)
    assert tokens_of(engine.handle(driver.compute(driver.batch(2, 1), 4, PROMPT[4:]))) == truth(1)


def test_engine_returns_stored_result_when_step_is_repeated() -> None:
    engine, driver = make_engine()
    result = engine.handle(driver.prefill())
    engine.handle(driver.decode(2, len(PROMPT)))
    assert engine.handle(driver.prefill()) == result
    assert engine.last_applied == 2


def test_engine_needs_snapshot_when_base_is_not_last_applied() -> None:
    engine, driver = make_engine()
    assert engine.handle(driver.decode(2, 6)).status == pb.STEP_STATUS_NEED_SNAPSHOT
    engine.handle(driver.prefill())
    assert engine.handle(driver.decode(3, 6)).status == pb.STEP_STATUS_NEED_SNAPSHOT


def test_engine_marks_row_when_it_reads_what_was_never_written() -> None:
    engine, driver = make_engine()
    batch = driver.compute(driver.add_row(driver.batch(1)), 4, PROMPT[4:])
    assert list(engine.handle(batch).row_statuses) == [pb.ROW_STATUS_INVALID_LOGITS]


def test_engine_marks_row_when_input_was_never_sampled() -> None:
    engine, driver = make_engine()
    engine.handle(driver.prefill())
    result = engine.handle(driver.decode(2, 6, steps_back=2))
    assert list(result.row_statuses) == [pb.ROW_STATUS_INPUT_UNAVAILABLE]


def test_engine_marks_rows_when_step_before_failed() -> None:
    engine, driver = make_engine(StepFaults(fail_step_at=2))
    engine.handle(driver.prefill())
    assert engine.handle(driver.decode(2, 6)).status == pb.STEP_STATUS_FAILED
    result = engine.handle(driver.compute(driver.batch(3, 2), 6, truth(1)))
    assert list(result.row_statuses) == [pb.ROW_STATUS_INVALID_LOGITS]
    assert engine.violations == []


Edit = Callable[[pb.ScheduleBatch, Driver], object]


def _set(path: str, value: object) -> Edit:
    def edit(batch: pb.ScheduleBatch, _: Driver) -> None:
        *parents, name = path.split(".")
        message: object = batch
        for parent in parents:
            message = getattr(message, parent)
        setattr(message, name, value)

    return edit


REFUSALS: dict[str, tuple[Edit, pb.StepErrorReason]] = {
    "wrong_epoch": (_set("executor_epoch", 1), pb.STEP_ERROR_REASON_WRONG_EXECUTOR_EPOCH),
    "stale_epoch": (_set("scheduler_epoch", 9), pb.STEP_ERROR_REASON_STALE_SCHEDULER_EPOCH),
    "odd_length": (_set("work.row_ids", b"abc"), pb.STEP_ERROR_REASON_MALFORMED),
    "no_tokens": (_set("work.token_ids", b""), pb.STEP_ERROR_REASON_MALFORMED),
    "bad_flag": (_set("work.samples", b"\x02"), pb.STEP_ERROR_REASON_MALFORMED),
    "unknown_row": (_set("work.row_ids", i32([7])), pb.STEP_ERROR_REASON_ROW_UNKNOWN),
    "removed_unknown": (_set("removed_row_ids", i32([7])), pb.STEP_ERROR_REASON_ROW_UNKNOWN),
    "row_exists": (lambda b, d: d.add_row(b, 0), pb.STEP_ERROR_REASON_ROW_EXISTS),
    "row_limit": (lambda b, d: d.add_row(b, 99), pb.STEP_ERROR_REASON_LIMIT_EXCEEDED),
    "too_many_tokens": (
        lambda b, d: d.compute(b, 6, [1] * 300),
        pb.STEP_ERROR_REASON_LIMIT_EXCEEDED,
    ),
    "vocabulary": (
        _set("work.token_ids", i32([1000])),
        pb.STEP_ERROR_REASON_TOKEN_OUT_OF_RANGE,
    ),
    "position": (
        _set("work.num_computed_tokens", i32([12])),
        pb.STEP_ERROR_REASON_POSITION_OUT_OF_RANGE,
    ),
    "table_start": (
        lambda b, _: b.table_writes.CopyFrom(
            pb.TableWrites(
                row_ids=i32([0]),
                start_indexes=i32([4]),
                block_offsets=i32([0, 1]),
                block_ids=i32([1]),
            )
        ),
        pb.STEP_ERROR_REASON_POSITION_OUT_OF_RANGE,
    ),
    "no_host_pool": (
        lambda b, _: b.swap_out.CopyFrom(
            pb.BlockMoves(source_block_ids=i32([0]), destination_block_ids=i32([0]))
        ),
        pb.STEP_ERROR_REASON_BLOCK_OUT_OF_RANGE,
    ),
    "copy_overlap": (
        lambda b, _: b.copy.CopyFrom(
            pb.BlockMoves(source_block_ids=i32([0, 1]), destination_block_ids=i32([1, 2]))
        ),
        pb.STEP_ERROR_REASON_BLOCK_OVERLAP,
    ),
    "same_destination": (
        lambda b, _: b.copy.CopyFrom(
            pb.BlockMoves(source_block_ids=i32([0, 1]), destination_block_ids=i32([2, 2]))
        ),
        pb.STEP_ERROR_REASON_BLOCK_OVERLAP,
    ),
    "feature": (
        lambda b, d: (
            d.add_row(b, 1).new_rows.sampling_params[0].MergeFrom(pb.SamplingParams(num_logprobs=1))
        ),
        pb.STEP_ERROR_REASON_FEATURE_UNSUPPORTED,
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_engine_changes_nothing_when_batch_is_refused(name: str) -> None:
    edit, reason = REFUSALS[name]
    engine, driver = make_engine()
    first = engine.handle(driver.prefill())
    bad = driver.compute(driver.batch(2, 1), 6, truth(1))
    edit(bad, driver)
    assert engine.handle(bad).error.reason == reason
    second = engine.handle(driver.decode(2, 6))
    assert tokens_of(first, second) == truth(2)


def test_engine_refuses_repeat_when_result_is_no_longer_stored() -> None:
    engine, driver = make_engine(max_inflight_steps=1)
    engine.handle(driver.prefill())
    engine.handle(driver.decode(2, 6))
    result = engine.handle(driver.prefill())
    assert result.error.reason == pb.STEP_ERROR_REASON_STALE_STEP


async def test_executor_ends_stream_with_aborted_when_newer_stream_sends() -> None:
    executor = StrangerExecutor()
    await executor.start()
    driver = Driver(executor.info)
    try:
        async with grpc.aio.insecure_channel(executor.info.address) as channel:
            stub = pb_grpc.ExecutorServiceStub(channel)
            older = stub.Execute()
            await older.write(driver.prefill())
            first = await older.read()
            newer = stub.Execute()
            await newer.write(driver.decode(2, 6))
            second = await newer.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await older.read()
            newer.cancel()
    finally:
        await executor.close()
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert tokens_of(first, second) == truth(2)
