"""Decoding of a ScheduleBatch into columns that are views of its bytes.

Only one thing is checked here: that the length of a column is a multiple of its element width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from executor_service.steps import (
    NO_MOVES,
    Batch,
    BatchContent,
    BatchRefused,
    BlockMoves,
    Float32Array,
    Grammar,
    Int32Array,
    Int64Array,
    NewCross,
    NewRows,
    PoolingParams,
    PoolingTask,
    SamplingParams,
    StepErrorReason,
    StepIdentity,
    TableWrites,
    TranscriptionRules,
    Work,
)
from splitserve.executor.v1 import executor_pb2 as pb

# -- Columns of the contract as views of the message's bytes ---------------------------------------

INT32 = np.dtype("<i4")
INT64 = np.dtype("<i8")
FLOAT32 = np.dtype("<f4")
UINT8 = np.dtype("u1")
_NO_INT32 = np.empty(0, INT32)


def read_int32(column: bytes, path: str) -> Int32Array:
    """Returns the elements of an i32 column. Raises BatchRefused if the length is wrong."""
    if not column:
        return _NO_INT32
    if len(column) % 4:
        raise _no_column(column, 4, path)
    return np.frombuffer(column, INT32)


def read_int64(column: bytes, path: str) -> Int64Array:
    """Returns the elements of an i64 column. Raises BatchRefused if the length is wrong."""
    if len(column) % 8:
        raise _no_column(column, 8, path)
    return np.frombuffer(column, INT64)


def read_float32(column: bytes, path: str) -> Float32Array:
    """Returns the elements of an f32 column. Raises BatchRefused if the length is wrong."""
    if len(column) % 4:
        raise _no_column(column, 4, path)
    return np.frombuffer(column, FLOAT32)


def read_offsets(column: bytes, path: str) -> Int32Array:
    """Returns an offsets column; an empty column stands for the single element 0."""
    return read_int32(column or bytes(4), path)


def read_optional_offsets(column: bytes, num_things: int, path: str) -> Int32Array:
    """Returns an offsets column; an empty column means that no thing has elements."""
    return read_int32(column, path) if column else np.zeros(num_things + 1, np.int32)


def _no_column(column: bytes, width: int, path: str) -> BatchRefused:
    return BatchRefused(
        StepErrorReason.MALFORMED, path, f"{len(column)} bytes; allowed: a multiple of {width}"
    )


# -- Messages to batches ---------------------------------------------------------------------------

# Scalar parameters that messages omit for their neutral value; the names are those of our
# SamplingParams.
_OPTIONAL_PARAMS = tuple(
    field.name
    for field in pb.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.message_type is None
)
_POOLING_TASKS = {
    pb.POOLING_TASK_EMBEDDING: PoolingTask.EMBEDDING,
    pb.POOLING_TASK_SCORES: PoolingTask.SCORES,
}
_NO_IDS = np.empty(0, INT32)
_NO_WORK = Work(_NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS, np.empty(0, UINT8))


def decode_batch(message: pb.ScheduleBatch) -> Batch:
    """Returns `message` with columns as views of its bytes; a decoding error as BatchRefused."""
    identity = StepIdentity(
        message.scheduler_epoch,
        message.executor_epoch,
        message.step_id,
        message.base_step_id if message.HasField("base_step_id") else None,
    )
    try:
        return Batch(identity, _decode_content(message))
    except BatchRefused as refusal:
        return Batch(identity, refusal)


def _decode_content(message: pb.ScheduleBatch) -> BatchContent:
    has = message.HasField
    return BatchContent(
        removed_row_ids=read_int32(message.removed_row_ids, "removed_row_ids"),
        new_rows=_decode_new_rows(message.new_rows) if has("new_rows") else None,
        table_writes=_decode_table_writes(message.table_writes) if has("table_writes") else None,
        swap_out=_decode_moves(message.swap_out, "swap_out") if has("swap_out") else NO_MOVES,
        swap_in=_decode_moves(message.swap_in, "swap_in") if has("swap_in") else NO_MOVES,
        copy=_decode_moves(message.copy, "copy") if has("copy") else NO_MOVES,
        work=_decode_work(message.work) if has("work") else _NO_WORK,
    )


def _decode_table_writes(writes: pb.TableWrites) -> TableWrites:
    return TableWrites(
        row_ids=read_int32(writes.row_ids, "table_writes.row_ids"),
        start_indexes=read_int32(writes.start_indexes, "table_writes.start_indexes"),
        block_offsets=read_offsets(writes.block_offsets, "table_writes.block_offsets"),
        block_ids=read_int32(writes.block_ids, "table_writes.block_ids"),
    )


def _decode_moves(moves: pb.BlockMoves, path: str) -> BlockMoves:
    return BlockMoves(
        sources=read_int32(moves.source_block_ids, f"{path}.source_block_ids"),
        destinations=read_int32(moves.destination_block_ids, f"{path}.destination_block_ids"),
    )


def _decode_work(work: pb.Work) -> Work:
    return Work(
        row_ids=read_int32(work.row_ids, "work.row_ids"),
        num_computed_tokens=read_int32(work.num_computed_tokens, "work.num_computed_tokens"),
        num_new_tokens=read_int32(work.num_new_tokens, "work.num_new_tokens"),
        sampled_steps_back=read_int32(work.sampled_steps_back, "work.sampled_steps_back"),
        token_ids=read_int32(work.token_ids, "work.token_ids"),
        samples=np.frombuffer(work.samples, UINT8),
        num_run_on_tokens=read_int32(work.num_run_on_tokens, "work.num_run_on_tokens"),
        draft_offsets=read_int32(work.draft_offsets, "work.draft_offsets"),
        draft_token_ids=read_int32(work.draft_token_ids, "work.draft_token_ids"),
        reports_parts=work.reports_parts,
    )


def _decode_new_rows(rows: pb.NewRows) -> NewRows:
    """Returns the columns of `rows`. Raises BatchRefused for a column of a wrong length."""
    row_ids = read_int32(rows.row_ids, "new_rows.row_ids")
    return NewRows(
        row_ids=row_ids,
        sampling_params_indexes=read_int32(
            rows.sampling_params_indexes, "new_rows.sampling_params_indexes"
        ),
        seeds=read_int64(rows.seeds, "new_rows.seeds"),
        num_prompt_tokens=read_int32(rows.num_prompt_tokens, "new_rows.num_prompt_tokens"),
        block_offsets=read_offsets(rows.block_offsets, "new_rows.block_offsets"),
        block_ids=read_int32(rows.block_ids, "new_rows.block_ids"),
        history_offsets=read_offsets(rows.history_offsets, "new_rows.history_offsets"),
        history_token_ids=read_int32(rows.history_token_ids, "new_rows.history_token_ids"),
        sampling_params=tuple(_decode_params(params) for params in rows.sampling_params),
        adapter_indexes=read_int32(rows.adapter_indexes, "new_rows.adapter_indexes"),
        adapters=tuple(rows.adapters),
        cross=_decode_cross(rows, len(row_ids)),
    )


def _decode_cross(rows: pb.NewRows, num_rows: int) -> NewCross | None:
    columns = (
        rows.cross_block_offsets,
        rows.cross_block_ids,
        rows.encoder_offsets,
        rows.encoder_token_ids,
        rows.num_encoder_tokens,
        rows.encoder_feature_offsets,
        rows.encoder_features,
    )
    if not any(columns):
        return None
    lengths = read_int32(rows.num_encoder_tokens, "new_rows.num_encoder_tokens")
    return NewCross(
        block_offsets=read_optional_offsets(
            rows.cross_block_offsets, num_rows, "new_rows.cross_block_offsets"
        ),
        block_ids=read_int32(rows.cross_block_ids, "new_rows.cross_block_ids"),
        encoder_offsets=read_optional_offsets(
            rows.encoder_offsets, num_rows, "new_rows.encoder_offsets"
        ),
        encoder_token_ids=read_int32(rows.encoder_token_ids, "new_rows.encoder_token_ids"),
        num_encoder_tokens=lengths if len(lengths) else np.zeros(num_rows, np.int32),
        feature_offsets=read_optional_offsets(
            rows.encoder_feature_offsets, num_rows, "new_rows.encoder_feature_offsets"
        ),
        features=read_float32(rows.encoder_features, "new_rows.encoder_features"),
    )


def _decode_params(params: pb.SamplingParams) -> SamplingParams:
    fields: dict[str, Any] = {
        name: getattr(params, name) for name in _OPTIONAL_PARAMS if params.HasField(name)
    }
    return SamplingParams(
        **fields,
        logit_bias=dict(params.logit_bias),
        suppressed_token_ids=tuple(params.suppressed_token_ids),
        allowed_token_ids=tuple(params.allowed_token_ids),
        bad_words_token_ids=tuple(tuple(t.token_ids) for t in params.bad_words_token_ids),
        grammar=_decode_grammar(params.grammar) if params.HasField("grammar") else None,
        pooling=_decode_pooling(params.pooling) if params.HasField("pooling") else None,
        stop_token_ids=frozenset(params.stop_token_ids),
        transcription=_decode_transcription(params.transcription)
        if params.HasField("transcription")
        else None,
    )


def _decode_transcription(rules: pb.TranscriptionRules) -> TranscriptionRules:
    has_first = rules.HasField("first_timestamp_token_id")
    has_most = rules.HasField("max_first_timestamp")
    return TranscriptionRules(
        first_suppressed_token_ids=tuple(rules.first_suppressed_token_ids),
        first_timestamp_token_id=rules.first_timestamp_token_id if has_first else None,
        first_special_token_id=rules.first_special_token_id,
        max_first_timestamp=rules.max_first_timestamp if has_most else None,
    )


def _decode_pooling(pooling: pb.PoolingParams) -> PoolingParams:
    task = _POOLING_TASKS.get(pooling.task)
    if task is None:
        allowed = f"allowed: {', '.join(map(str, _POOLING_TASKS))}"
        path = "new_rows.sampling_params.pooling.task"
        raise BatchRefused(StepErrorReason.MALFORMED, path, f"is {pooling.task}; {allowed}")
    return PoolingParams(task, pooling.num_dimensions, pooling.raw, pooling.second_text_start)


def _decode_grammar(grammar: pb.Grammar) -> Grammar:
    kind = grammar.WhichOneof("kind")
    if kind is None:
        return Grammar("", ())
    texts = grammar.choices.texts if kind == "choices" else (getattr(grammar, kind),)
    return Grammar(kind, tuple(texts))
