"""Protobuf on one side, columns on the other; no column is copied on its way in.

Nothing is judged here but whether a column is one: its length a multiple of its element width.
"""

from __future__ import annotations

from dataclasses import asdict
from types import MappingProxyType

import numpy as np

from executor_service.batch import (
    INTERNAL_ERROR_MESSAGE,
    Batch,
    BatchContent,
    BatchRefused,
    Feature,
    StepAnswer,
    StepErrorReason,
    StepIdentity,
    StepRows,
    StepStatus,
    TableWrites,
    Work,
)
from executor_service.executor_info import (
    CONTRACT_MAJOR,
    CONTRACT_MINOR,
    DefaultSampling,
    ExecutorInfo,
)
from executor_service.new_rows_codec import decode_new_rows
from executor_service.step import (
    BlockMoves,
    Float32Array,
    Int32Array,
    LogprobColumns,
    RowStatus,
    UInt8Array,
)
from executor_service.wire_columns import FLOAT32, INT32, UINT8, read_int32, read_offsets
from splitserve.executor.v1 import executor_pb2 as pb

# An enum's member is slow to compare with.
_ROW_OK = np.uint8(RowStatus.OK.value)
_NO_IDS = np.empty(0, INT32)
_NO_MOVES = BlockMoves(_NO_IDS, _NO_IDS)
_NO_WORK = Work(_NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS, np.empty(0, UINT8))

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
        removed_row_ids=read_int32(message.removed_row_ids, "removed_row_ids"),
        new_rows=decode_new_rows(message.new_rows) if has("new_rows") else None,
        table_writes=_decode_table_writes(message.table_writes) if has("table_writes") else None,
        swap_out=_decode_moves(message.swap_out, "swap_out") if has("swap_out") else _NO_MOVES,
        swap_in=_decode_moves(message.swap_in, "swap_in") if has("swap_in") else _NO_MOVES,
        copy=_decode_moves(message.copy, "copy") if has("copy") else _NO_MOVES,
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
    result.sampled_token_ids = _bytes(rows.sampled_token_ids, INT32)
    if np.count_nonzero(rows.row_statuses != _ROW_OK):
        result.row_statuses = _bytes(rows.row_statuses, UINT8)
    for row_index, message in sorted(rows.row_errors.items()):
        result.row_errors.add(row_index=row_index, message=message)
    if rows.logprobs is not None:
        result.logprobs.CopyFrom(_encode_logprobs(rows.logprobs))
    if rows.prompt_logprobs is not None:
        result.prompt_logprobs.CopyFrom(_encode_logprobs(rows.prompt_logprobs))


def _encode_logprobs(columns: LogprobColumns) -> pb.Logprobs:
    return pb.Logprobs(
        row_indexes=_bytes(columns.row_indexes, INT32),
        positions=_bytes(columns.positions, INT32),
        token_ids=_bytes(columns.token_ids, INT32),
        logprobs=_bytes(columns.logprobs, FLOAT32),
        ranks=_bytes(columns.ranks, INT32),
        top_offsets=_bytes(columns.top_offsets, INT32),
        top_token_ids=_bytes(columns.top_token_ids, INT32),
        top_logprobs=_bytes(columns.top_logprobs, FLOAT32),
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
            sliding_window_tokens=model.sliding_window,
            default_sampling_params=_encode_default_sampling(model.default_sampling),
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
            max_adapters_per_step=info.limits.max_adapters_per_step,
        ),
        features=[_FEATURES[feature] for feature in sorted(info.features)],
        software_version=info.software_version,
    )


def _encode_default_sampling(sampling: DefaultSampling) -> pb.SamplingParams | None:
    """None where there is nothing to say."""
    given = {name: value for name, value in asdict(sampling).items() if value is not None}
    return pb.SamplingParams(**given) if given else None
