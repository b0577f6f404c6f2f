"""What contract 1.1 added, on the stranger executor: adapters, encoder tokens, windows."""

import pytest

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.stranger.columns import i32, read_i32
from tests.contract.stranger.engine import Engine, StepFaults
from tests.contract.stranger.executor import ExecutorConfig, StrangerExecutor, expected_tokens
from tests.contract.stranger.test_executor import PROMPT, SEED, Driver
from tests.contract.stranger.truth import start_of

ENCODER = [21, 22, 23, 24, 25]
FEATURES = (pb.FEATURE_ADAPTERS, pb.FEATURE_CROSS_ATTENTION)
WINDOW = 3


def make_engine(config: ExecutorConfig | None = None) -> tuple[Engine, Driver]:
    default = ExecutorConfig(features=FEATURES, max_adapters_per_step=1)
    info = StrangerExecutor(config or default)._describe()
    return Engine(info, StepFaults()), Driver(info)


def windowed() -> tuple[Engine, Driver]:
    return make_engine(ExecutorConfig(sliding_window=WINDOW))


def truth(n: int, adapter: str = "", encoder: list[int] | None = None) -> list[int]:
    return expected_tokens(PROMPT, SEED, 0.5, n, 1000, start_of(adapter, encoder or []))


def with_adapter(batch: pb.ScheduleBatch, name: str) -> pb.ScheduleBatch:
    batch.new_rows.adapters.append(name)
    batch.new_rows.adapter_indexes = i32([0])
    return batch


def with_encoder(batch: pb.ScheduleBatch, encoder: list[int]) -> pb.ScheduleBatch:
    rows = batch.new_rows
    rows.num_encoder_tokens = i32([len(ENCODER)])
    rows.cross_block_offsets, rows.cross_block_ids = i32([0, 2]), i32([8, 9])
    if encoder:
        rows.encoder_offsets, rows.encoder_token_ids = i32([0, len(encoder)]), i32(encoder)
    return batch


def token_of(result: pb.StepResult) -> int:
    (token,) = read_i32(result.sampled_token_ids, "")
    return token


def decoded(engine: Engine, driver: Driver, first: pb.ScheduleBatch) -> list[int]:
    """The token of `first`, and two more."""
    results = [engine.handle(first)]
    results += [engine.handle(driver.decode(2 + i, len(PROMPT) + i)) for i in range(2)]
    assert engine.violations == []
    return [token_of(result) for result in results]


def test_engine_samples_with_adapter_when_row_has_one() -> None:
    engine, driver = make_engine()
    tokens = decoded(engine, driver, with_adapter(driver.prefill(), "french"))
    assert tokens == truth(3, "french") != truth(3)


def test_engine_samples_with_encoder_when_row_brings_tokens_once() -> None:
    engine, driver = make_engine()
    tokens = decoded(engine, driver, with_encoder(driver.prefill(), ENCODER))
    assert tokens == truth(3, "", ENCODER) != truth(3)


def test_engine_marks_row_when_nobody_encoded_its_tokens() -> None:
    engine, driver = make_engine()
    result = engine.handle(with_encoder(driver.prefill(), []))
    assert list(result.row_statuses) == [pb.ROW_STATUS_INVALID_LOGITS]


def test_engine_marks_row_when_blocks_were_computed_with_another_adapter() -> None:
    engine, driver = make_engine()
    engine.handle(with_adapter(driver.prefill(), "french"))
    batch = driver.add_row(driver.batch(2, 1), 1)
    result = engine.handle(driver.compute(batch, 6, [1], row_id=1))
    assert list(result.row_statuses) == [pb.ROW_STATUS_INVALID_LOGITS]


def test_engine_reads_nothing_behind_window_when_blocks_there_are_gone() -> None:
    engine, driver = windowed()
    (first,) = (token_of(engine.handle(driver.prefill())),)
    batch = driver.compute(driver.add_row(driver.batch(2)), len(PROMPT), [first])
    # The token at position 6 reads from position 4 on.
    batch.new_rows.block_ids = i32([-1, 3, 4])
    second = token_of(engine.handle(batch))
    assert [first, second, token_of(engine.handle(driver.decode(3, 7)))] == truth(3)
    assert engine.violations == []


@pytest.mark.parametrize(
    ("blocks", "position"), [([-1, 3, 4], 5), ([5, -1, 4], 6), ([5, 3, -1], 8)]
)
def test_engine_refuses_when_a_block_in_the_window_is_missing(
    blocks: list[int], position: int
) -> None:
    engine, driver = windowed()
    batch = driver.compute(driver.add_row(driver.batch(1)), position, [1])
    batch.new_rows.block_ids = i32(blocks)
    assert engine.handle(batch).error.reason == pb.STEP_ERROR_REASON_BLOCK_OUT_OF_RANGE


def test_engine_refuses_missing_blocks_when_model_has_no_window() -> None:
    engine, driver = make_engine()
    batch = driver.prefill()
    batch.new_rows.block_ids = i32([5, 3, -1])
    assert engine.handle(batch).error.reason == pb.STEP_ERROR_REASON_BLOCK_OUT_OF_RANGE


def test_engine_refuses_when_a_step_has_too_many_adapters() -> None:
    engine, driver = make_engine()
    engine.handle(with_adapter(driver.add_row(driver.batch(1), 0), "a"))
    batch = with_adapter(driver.add_row(driver.batch(2, 1), 1), "b")
    batch.work.row_ids, batch.work.num_computed_tokens = i32([0, 1]), i32([0, 0])
    batch.work.num_new_tokens, batch.work.token_ids = i32([1, 1]), i32([5, 5])
    assert engine.handle(batch).error.reason == pb.STEP_ERROR_REASON_LIMIT_EXCEEDED


def test_engine_refuses_when_features_are_not_announced() -> None:
    engine, driver = make_engine(ExecutorConfig())
    batches = with_adapter(driver.prefill(), "a"), with_encoder(driver.prefill(), ENCODER)
    reasons = [engine.handle(batch).error.reason for batch in batches]
    assert reasons == [pb.STEP_ERROR_REASON_FEATURE_UNSUPPORTED] * 2


@pytest.mark.parametrize(
    ("field", "column", "reason"),
    [
        ("adapter_indexes", i32([1]), pb.STEP_ERROR_REASON_MALFORMED),
        ("adapter_indexes", i32([-2]), pb.STEP_ERROR_REASON_MALFORMED),
        ("num_encoder_tokens", i32([4]), pb.STEP_ERROR_REASON_MALFORMED),
        ("num_encoder_tokens", b"", pb.STEP_ERROR_REASON_MALFORMED),
        ("cross_block_offsets", i32([0, 1]), pb.STEP_ERROR_REASON_MALFORMED),
        ("cross_block_ids", i32([-1, 8]), pb.STEP_ERROR_REASON_BLOCK_OUT_OF_RANGE),
        ("encoder_offsets", b"", pb.STEP_ERROR_REASON_MALFORMED),
        ("encoder_token_ids", i32([1000] * 5), pb.STEP_ERROR_REASON_TOKEN_OUT_OF_RANGE),
    ],
)
def test_engine_refuses_when_a_column_is_wrong(
    field: str, column: bytes, reason: pb.StepErrorReason
) -> None:
    engine, driver = make_engine()
    batch = with_adapter(with_encoder(driver.prefill(), ENCODER), "a")
    setattr(batch.new_rows, field, column)
    assert engine.handle(batch).error.reason == reason


@pytest.mark.parametrize("num_right", range(4))
def test_engine_takes_drafts_as_long_as_they_are_right_when_it_verifies_them(
    num_right: int,
) -> None:
    engine, driver = make_engine(ExecutorConfig(features=(pb.FEATURE_SEVERAL_TOKENS,)))
    drafts = truth(3)
    if num_right < 3:
        drafts[num_right] += 1
    batch = driver.prefill()
    batch.work.draft_offsets, batch.work.draft_token_ids = i32([0, 3]), i32(drafts)
    result = engine.handle(batch)
    assert read_i32(result.sampled_token_ids, "") == truth(num_right + 1)
    # The most that it can be, as far as one knows who did not see the result.
    after = driver.decode(2, len(PROMPT) + 3)
    assert token_of(engine.handle(after)) == truth(num_right + 2)[-1]
    assert engine.violations == []
