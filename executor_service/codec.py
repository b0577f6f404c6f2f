"""Protobuf on one side, columns on the other; no column is copied on its way in.

Nothing is judged here but whether a column is one: its length a multiple of its element width.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from executor_service.batch import (
    INTERNAL_ERROR_MESSAGE,
    Batch,
    BatchContent,
    BatchRefused,
    Feature,
    NewRows,
    StepAnswer,
    StepErrorReason,
    StepIdentity,
    StepRows,
    StepStatus,
    TableWrites,
    Work,
)
from executor_service.executor_info import CONTRACT_MAJOR, CONTRACT_MINOR, ExecutorInfo
from executor_service.step import (
    BlockMoves,
    Float32Array,
    Int32Array,
    Int64Array,
    LogprobColumns,
    RowStatus,
    SamplingParams,
    UInt8Array,
)
from splitserve.executor.v1 import executor_pb2 as pb

_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")
_FLOAT32 = np.dtype("<f4")
_UINT8 = np.dtype("u1")

# An enum's member is slow to compare with.
_ROW_OK = np.uint8(RowStatus.OK.value)
_NO_IDS = np.empty(0, _INT32)
_NO_MOVES = BlockMoves(_NO_IDS, _NO_IDS)
_NO_WORK = Work(_NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS, np.empty(0, _UINT8))

# The generated stubs cannot tell the type of an enum's value from its name; getattr can do without.
_STATUSES = MappingProxyType(
    {status: getattr(pb, f"STEP_STATUS_{status.name}") for status in StepStatus}
)
_REASONS = MappingProxyType(
    {reason: getattr(pb, f"STEP_ERROR_REASON_{reason.name}") for reason in StepErrorReason}
)
_FEATURES = MappingProxyType(
    {feature: getattr(pb, f"FEATURE_{feature.name}") for feature in Feature}
)

# Fields that are absent where they have their neutral value.
_OPTIONAL_PARAMS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "num_logprobs",
    "num_prompt_logprobs",
)


# -- batches ---------------------------------------------------------------------------------------


def decode_batch(message: pb.ScheduleBatch) -> Batch:
    """Columns of `message`, lying in its bytes. What cannot be read becomes a BatchRefused."""
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
        removed_row_ids=_int32(message.removed_row_ids, "removed_row_ids"),
        new_rows=_decode_new_rows(message.new_rows) if has("new_rows") else None,
        table_writes=_decode_table_writes(message.table_writes) if has("table_writes") else None,
        swap_out=_decode_moves(message.swap_out, "swap_out") if has("swap_out") else _NO_MOVES,
        swap_in=_decode_moves(message.swap_in, "swap_in") if has("swap_in") else _NO_MOVES,
        copy=_decode_moves(message.copy, "copy") if has("copy") else _NO_MOVES,
        work=_decode_work(message.work) if has("work") else _NO_WORK,
    )


def _decode_new_rows(rows: pb.NewRows) -> NewRows:
    return NewRows(
        row_ids=_int32(rows.row_ids, "new_rows.row_ids"),
        sampling_params_indexes=_int32(
            rows.sampling_params_indexes, "new_rows.sampling_params_indexes"
        ),
        seeds=_int64(rows.seeds, "new_rows.seeds"),
        num_prompt_tokens=_int32(rows.num_prompt_tokens, "new_rows.num_prompt_tokens"),
        block_offsets=_offsets(rows.block_offsets, "new_rows.block_offsets"),
        block_ids=_int32(rows.block_ids, "new_rows.block_ids"),
        history_offsets=_offsets(rows.history_offsets, "new_rows.history_offsets"),
        history_token_ids=_int32(rows.history_token_ids, "new_rows.history_token_ids"),
        sampling_params=tuple(_decode_params(params) for params in rows.sampling_params),
    )


def _decode_params(params: pb.SamplingParams) -> SamplingParams:
    given: dict[str, Any] = {
        name: getattr(params, name) for name in _OPTIONAL_PARAMS if params.HasField(name)
    }
    return SamplingParams(
        **given,
        logit_bias=dict(params.logit_bias),
        suppressed_token_ids=tuple(params.suppressed_token_ids),
    )


def _decode_table_writes(writes: pb.TableWrites) -> TableWrites:
    return TableWrites(
        row_ids=_int32(writes.row_ids, "table_writes.row_ids"),
        start_indexes=_int32(writes.start_indexes, "table_writes.start_indexes"),
        block_offsets=_offsets(writes.block_offsets, "table_writes.block_offsets"),
        block_ids=_int32(writes.block_ids, "table_writes.block_ids"),
    )


def _decode_moves(moves: pb.BlockMoves, path: str) -> BlockMoves:
    return BlockMoves(
        sources=_int32(moves.source_block_ids, f"{path}.source_block_ids"),
        destinations=_int32(moves.destination_block_ids, f"{path}.destination_block_ids"),
    )


def _decode_work(work: pb.Work) -> Work:
    return Work(
        row_ids=_int32(work.row_ids, "work.row_ids"),
        num_computed_tokens=_int32(work.num_computed_tokens, "work.num_computed_tokens"),
        num_new_tokens=_int32(work.num_new_tokens, "work.num_new_tokens"),
        sampled_steps_back=_int32(work.sampled_steps_back, "work.sampled_steps_back"),
        token_ids=_int32(work.token_ids, "work.token_ids"),
        samples=np.frombuffer(work.samples, _UINT8),
    )


def _int32(column: bytes, path: str) -> Int32Array:
    if len(column) % 4:
        raise _no_column(column, 4, path)
    return np.frombuffer(column, _INT32)


def _int64(column: bytes, path: str) -> Int64Array:
    if len(column) % 8:
        raise _no_column(column, 8, path)
    return np.frombuffer(column, _INT64)


def _offsets(column: bytes, path: str) -> Int32Array:
    """For no things, the empty column stands for the one element 0."""
    return _int32(column or bytes(4), path)


def _no_column(column: bytes, width: int, path: str) -> BatchRefused:
    return BatchRefused(
        StepErrorReason.MALFORMED, path, f"{len(column)} bytes; allowed: a multiple of {width}"
    )


# -- answers ---------------------------------------------------------------------------------------


def encode_answer(answer: StepAnswer) -> pb.StepResult:
    """The message of `answer`."""
    result = pb.StepResult(
        scheduler_epoch=answer.scheduler_epoch,
        executor_epoch=answer.executor_epoch,
        step_id=answer.step_id,
        status=_STATUSES[answer.status],
    )
    if answer.rows is not None:
        _encode_rows(answer.rows, result)
    if answer.error is not None:
        result.error.reason = _REASONS[answer.error.reason]
        result.error.field = answer.error.field
        result.error.message = answer.error.message
    if answer.status in (StepStatus.OK, StepStatus.FAILED):
        result.timings.queue_us = answer.timings.queue_us
        result.timings.move_us = answer.timings.move_us
        result.timings.forward_us = answer.timings.forward_us
        result.timings.sample_us = answer.timings.sample_us
    return result


def encode_internal_error(batch: pb.ScheduleBatch) -> pb.StepResult:
    """FAILED, for a batch that nobody could answer; it is not stored, so a snapshot must follow."""
    return pb.StepResult(
        scheduler_epoch=batch.scheduler_epoch,
        executor_epoch=batch.executor_epoch,
        step_id=batch.step_id,
        status=_STATUSES[StepStatus.FAILED],
        error=pb.StepError(
            reason=_REASONS[StepErrorReason.INTERNAL], message=INTERNAL_ERROR_MESSAGE
        ),
    )


def _encode_rows(rows: StepRows, result: pb.StepResult) -> None:
    result.sampled_token_ids = _bytes(rows.sampled_token_ids, _INT32)
    if np.count_nonzero(rows.row_statuses != _ROW_OK):
        result.row_statuses = _bytes(rows.row_statuses, _UINT8)
    for row_index, message in sorted(rows.row_errors.items()):
        result.row_errors.add(row_index=row_index, message=message)
    if rows.logprobs is not None:
        result.logprobs.CopyFrom(_encode_logprobs(rows.logprobs))
    if rows.prompt_logprobs is not None:
        result.prompt_logprobs.CopyFrom(_encode_logprobs(rows.prompt_logprobs))


def _encode_logprobs(columns: LogprobColumns) -> pb.Logprobs:
    return pb.Logprobs(
        row_indexes=_bytes(columns.row_indexes, _INT32),
        positions=_bytes(columns.positions, _INT32),
        token_ids=_bytes(columns.token_ids, _INT32),
        logprobs=_bytes(columns.logprobs, _FLOAT32),
        ranks=_bytes(columns.ranks, _INT32),
        top_offsets=_bytes(columns.top_offsets, _INT32),
        top_token_ids=_bytes(columns.top_token_ids, _INT32),
        top_logprobs=_bytes(columns.top_logprobs, _FLOAT32),
    )


def _bytes(column: Int32Array | Float32Array | UInt8Array, dtype: np.dtype[np.generic]) -> bytes:
    return column.astype(dtype, copy=False).tobytes()


# -- handshake -------------------------------------------------------------------------------------


def encode_info(info: ExecutorInfo) -> pb.ExecutorInfo:
    """The message of `info`, with the contract's version."""
    model = info.model
    return pb.ExecutorInfo(
        contract_version=pb.ContractVersion(major=CONTRACT_MAJOR, minor=CONTRACT_MINOR),
        executor_epoch=info.executor_epoch,
        address=info.address,
        model=pb.ModelInfo(
            name=model.name,
            digest=model.digest,
            dtype=model.dtype,
            kv_cache_dtype=model.kv_cache_dtype,
            vocab_size=model.vocab_size,
            max_model_len_tokens=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
        ),
        block_size_tokens=info.block_size,
        num_device_blocks=info.num_device_blocks,
        num_host_blocks=info.num_host_blocks,
        block_bytes=info.block_bytes,
        limits=pb.ExecutorLimits(
            max_num_rows=info.limits.max_num_rows,
            max_num_batched_tokens=info.limits.max_num_batched_tokens,
            max_message_bytes=info.limits.max_message_bytes,
            max_inflight_steps=info.limits.max_inflight_steps,
        ),
        features=[_FEATURES[feature] for feature in sorted(info.features)],
        software_version=info.software_version,
    )
