"""Encoding of step answers and of the handshake as messages."""

from __future__ import annotations

from dataclasses import asdict
from types import MappingProxyType

import numpy as np

from executor_service.service.batch_decoding import FLOAT32, INT32, UINT8
from executor_service.steps import (
    INTERNAL_ERROR_MESSAGE,
    AdapterSupport,
    DefaultSampling,
    EncoderInfo,
    ExecutorInfo,
    Feature,
    Float32Array,
    Int32Array,
    LogprobColumns,
    ModelVectors,
    RowStatus,
    StepAnswer,
    StepErrorReason,
    StepIdentity,
    StepOutput,
    StepStatus,
    TokenRuns,
    TrialStep,
    UInt8Array,
)
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_contract import CONTRACT_MAJOR, CONTRACT_MINOR, SAMPLING_VERSION

_NO_NUMBERS = np.empty(0, np.float32)
# Longest text that schedulers accept.
_MAX_TEXT_CHARS = 1024
# A numpy number compares faster than an enum member.
_ROW_OK = np.uint8(RowStatus.OK.value)

# mypy does not know enum values by computed names; getattr avoids an error.
_STATUSES = MappingProxyType(
    {status: getattr(pb, f"STEP_STATUS_{status.name}") for status in StepStatus}
)
_REASONS = MappingProxyType(
    {reason: getattr(pb, f"STEP_ERROR_REASON_{reason.name}") for reason in StepErrorReason}
)
_FEATURES = MappingProxyType(
    {feature: getattr(pb, f"FEATURE_{feature.name}") for feature in Feature}
)


# -- answers ---------------------------------------------------------------------------------------


def encode_answer(answer: StepAnswer) -> pb.StepResult:
    """Returns the message of `answer`."""
    result = pb.StepResult(
        scheduler_epoch=answer.scheduler_epoch,
        executor_epoch=answer.executor_epoch,
        step_id=answer.step_id,
        status=_STATUSES[answer.status],
    )
    output = answer.output
    if output is not None:
        _encode_output(output, result)
    if answer.error is not None:
        result.error.reason = _REASONS[answer.error.reason]
        result.error.field = answer.error.field
        result.error.message = answer.error.message
    if answer.status in (StepStatus.OK, StepStatus.FAILED):
        result.timings.queue_us = answer.queue_us
        if output is not None:
            result.timings.move_us = output.move_us
            result.timings.forward_us = output.forward_us
            result.timings.sample_us = output.sample_us
    return result


def encode_part(identity: StepIdentity, runs: TokenRuns) -> pb.StepResult:
    """Returns a part of the result of step `identity`: `runs`, further tokens of its rows [R]."""
    return pb.StepResult(
        scheduler_epoch=identity.scheduler_epoch,
        executor_epoch=identity.executor_epoch,
        step_id=identity.step_id,
        status=pb.STEP_STATUS_PARTIAL,
        sampled_token_ids=_bytes(runs.token_ids, INT32),
        sampled_offsets=_bytes(runs.offsets, INT32),
    )


def encode_internal_error(batch: pb.ScheduleBatch) -> pb.StepResult:
    """Returns FAILED for a batch without an answer. It is not stored: a snapshot must follow."""
    return pb.StepResult(
        scheduler_epoch=batch.scheduler_epoch,
        executor_epoch=batch.executor_epoch,
        step_id=batch.step_id,
        status=_STATUSES[StepStatus.FAILED],
        error=pb.StepError(
            reason=_REASONS[StepErrorReason.INTERNAL], message=INTERNAL_ERROR_MESSAGE
        ),
    )


def _encode_output(output: StepOutput, result: pb.StepResult) -> None:
    if output.runs is None:
        result.sampled_token_ids = _bytes(output.sampled_token_ids, INT32)
    else:
        result.sampled_token_ids = _bytes(output.runs.token_ids, INT32)
        result.sampled_offsets = _bytes(output.runs.offsets, INT32)
    if np.count_nonzero(output.row_statuses != _ROW_OK):
        result.row_statuses = _bytes(output.row_statuses, UINT8)
    for row_index, message in sorted(output.row_errors.items()):
        result.row_errors.add(row_index=row_index, message=message)
    if output.vectors:
        parts = [_NO_NUMBERS if vector is None else vector for vector in output.vectors]
        offsets = np.cumsum([0, *map(len, parts)]).astype(np.int32)
        result.vector_offsets = _bytes(offsets, INT32)
        result.vectors = _bytes(np.concatenate(parts), FLOAT32)
    if output.logprobs is not None:
        result.logprobs.CopyFrom(_encode_logprobs(output.logprobs))
    if output.prompt_logprobs is not None:
        result.prompt_logprobs.CopyFrom(_encode_logprobs(output.prompt_logprobs))


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
    """Returns the message of `info`, with the contract version."""
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
            quantization=model.quantization,
            encoder=_encode_encoder(model.encoder),
            pooling=_encode_vectors(model.vectors),
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
        newest_scheduler_epoch=info.newest_scheduler_epoch,
        step_running_ms=info.step_running_ms,
        trial_step=_encode_trial_step(info.trial_step),
        sampling_version=SAMPLING_VERSION,
        compute=info.compute[:_MAX_TEXT_CHARS],
        slow_compute_reason=info.slow_compute_reason[:_MAX_TEXT_CHARS],
        # Steps run in a thread of their own, so the event loop answers meanwhile.
        answers_while_computing=True,
        adapter_support=_encode_adapter_support(info.adapter_support),
    )


def _encode_adapter_support(support: AdapterSupport | None) -> pb.AdapterSupport | None:
    if support is None:
        return None
    return pb.AdapterSupport(
        max_num_loaded=support.max_num_loaded,
        max_rank=support.max_rank,
        target_modules=support.target_modules,
    )


def _encode_trial_step(trial: TrialStep | None) -> pb.TrialStep | None:
    return None if trial is None else pb.TrialStep(**asdict(trial))


def _encode_encoder(encoder: EncoderInfo | None) -> pb.EncoderInfo | None:
    if encoder is None:
        return None
    return pb.EncoderInfo(
        max_tokens=encoder.max_tokens,
        decoder_token_ids=encoder.decoder_token_ids,
        audio=None if encoder.audio is None else pb.AudioInfo(**asdict(encoder.audio)),
    )


def _encode_vectors(vectors: ModelVectors | None) -> pb.PoolingInfo | None:
    if vectors is None:
        return None
    return pb.PoolingInfo(
        embedding_size=vectors.embedding_size,
        labels=vectors.labels,
        uncached=vectors.is_uncached,
    )


def _encode_default_sampling(sampling: DefaultSampling) -> pb.SamplingParams | None:
    """Returns the recommended parameters, None if there are none."""
    fields = {name: value for name, value in asdict(sampling).items() if value is not None}
    return pb.SamplingParams(**fields) if fields else None
