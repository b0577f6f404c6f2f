"""Conversion between protobuf messages and the values of the client."""

from __future__ import annotations

import sys
from array import array
from dataclasses import asdict, fields
from typing import assert_never

from splitserve.executor.v1 import executor_pb2
from splitserve.scheduler.v1 import admin_pb2, scheduler_pb2
from splitserve_client.errors import RequestFailed, error_of_reason
from splitserve_client.scheduler_info import (
    Adapter,
    AudioInput,
    Encoder,
    Executor,
    ExecutorList,
    Identity,
    Model,
    Pooling,
    Readiness,
)
from splitserve_rpc import duration_from_s
from splitserve_text import (
    BeamSearch,
    Choices,
    EarlyStopping,
    Finish,
    FinishReason,
    Grammar,
    JsonSchema,
    KeptOutput,
    Lark,
    PoolingParams,
    PoolingTask,
    Regex,
    SamplingParams,
    SchedulingParams,
    SequenceFinish,
    SplitserveError,
    TokenLogprob,
    Tokens,
    TopLogprob,
    Usage,
)

_EARLY_STOPPING = {
    EarlyStopping.HEURISTIC: scheduler_pb2.BEAM_EARLY_STOPPING_HEURISTIC,
    EarlyStopping.ALWAYS: scheduler_pb2.BEAM_EARLY_STOPPING_ALWAYS,
    EarlyStopping.NEVER: scheduler_pb2.BEAM_EARLY_STOPPING_NEVER,
}
_FINISH_REASONS = {
    scheduler_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    scheduler_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    scheduler_pb2.FINISH_REASON_MODEL_LENGTH: FinishReason.MODEL_LENGTH,
    scheduler_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}
_POOLING_TASKS = {
    PoolingTask.EMBEDDING: scheduler_pb2.POOLING_TASK_EMBEDDING,
    PoolingTask.SCORES: scheduler_pb2.POOLING_TASK_SCORES,
}
_READINESS = {
    scheduler_pb2.READINESS_READY: Readiness.READY,
    scheduler_pb2.READINESS_NO_EXECUTOR: Readiness.NO_EXECUTOR,
    scheduler_pb2.READINESS_NO_PROGRESS: Readiness.NO_PROGRESS,
    scheduler_pb2.READINESS_DRAINING: Readiness.DRAINING,
    scheduler_pb2.READINESS_EXECUTORS_FAILING: Readiness.EXECUTORS_FAILING,
}
# Fields of an executor with the same name in the message and in `Executor`.
_EXECUTOR_STATE = frozenset(admin_pb2.ExecutorState.DESCRIPTOR.fields_by_name) & {
    field.name for field in fields(Executor)
}


def encode_sampling_params(params: SamplingParams) -> scheduler_pb2.SamplingParams:
    """Encodes sampling parameters.

    Raises ValueError or TypeError for a value of the wrong type or range.
    """
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise ValueError("allowed_token_ids is empty; allowed: 1 or more, or None for all")
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    values["bad_words_token_ids"] = [
        scheduler_pb2.TokenSequence(token_ids=tokens) for tokens in params.bad_words_token_ids
    ]
    if params.beam_search is not None:
        values["beam_search"] = _encode_beam_search(params.beam_search)
    if params.grammar is not None:
        values["grammar"] = _encode_grammar(params.grammar)
    if params.transcription is not None:
        values["transcription"] = scheduler_pb2.TranscriptionRules(**asdict(params.transcription))
    if params.pooling is not None:
        values["pooling"] = _encode_pooling(params.pooling)
    present = {name: value for name, value in values.items() if value is not None}
    return scheduler_pb2.SamplingParams(**present)


def _encode_pooling(pooling: PoolingParams) -> scheduler_pb2.PoolingParams:
    return scheduler_pb2.PoolingParams(
        task=None if pooling.task is None else _POOLING_TASKS[pooling.task],
        num_dimensions=pooling.num_dimensions,
        raw=pooling.raw,
        second_text_start=pooling.second_text_start,
    )


def _encode_beam_search(beams: BeamSearch) -> scheduler_pb2.BeamSearch:
    stopping = None if beams.early_stopping is None else _EARLY_STOPPING[beams.early_stopping]
    return scheduler_pb2.BeamSearch(
        width=beams.width, length_penalty=beams.length_penalty, early_stopping=stopping
    )


def _encode_grammar(grammar: Grammar) -> scheduler_pb2.Grammar:
    match grammar:
        case JsonSchema(schema):
            return scheduler_pb2.Grammar(json_schema=schema)
        case Regex(pattern):
            return scheduler_pb2.Grammar(regex=pattern)
        case Lark(text):
            return scheduler_pb2.Grammar(lark=text)
        case Choices(texts):
            return scheduler_pb2.Grammar(choices=scheduler_pb2.Choices(texts=texts))
        case _:
            assert_never(grammar)


def encode_scheduling_params(
    params: SchedulingParams, deadline_s: float | None
) -> scheduler_pb2.GenerateRequest:
    """Encodes `params` as a request; `deadline_s` is the remaining time until the deadline.

    Raises ValueError, TypeError or OverflowError for a value that does not fit its field.
    """
    return scheduler_pb2.GenerateRequest(
        priority=params.priority,
        tenant=params.tenant,
        deadline=None if deadline_s is None else duration_from_s(deadline_s),
        adapter=params.adapter,
        cache_salt=params.cache_salt,
        bypass_prefix_cache=params.bypass_prefix_cache,
        num_public_prefix_tokens=params.num_public_prefix_tokens,
        kept_output=None if params.kept_output is None else _encode_kept(params.kept_output),
        target_itl_ms=params.target_itl_ms,
    )


def _encode_kept(kept: KeptOutput) -> scheduler_pb2.KeptOutput:
    return scheduler_pb2.KeptOutput(
        key=kept.key,
        duration=None if kept.duration_s is None else duration_from_s(kept.duration_s),
        resumes=kept.resumes,
        num_read_tokens=kept.num_read_tokens,
    )


def decode_tokens(chunk: scheduler_pb2.TokenChunk) -> Tokens:
    """Decodes new tokens with their scores."""
    return Tokens(
        tuple(chunk.token_ids),
        tuple(map(_decode_logprob, chunk.logprobs)),
        tuple(map(_decode_logprob, chunk.prompt_logprobs)),
        chunk.index,
    )


def decode_sequence_finish(finish: scheduler_pb2.SequenceFinish) -> SequenceFinish:
    """Decodes the end of one of several sequences. Raises RequestFailed for an unknown reason."""
    reason = _FINISH_REASONS.get(finish.reason)
    if reason is None:
        raise RequestFailed(f"a sequence ended for an unknown reason ({finish.reason})")
    return SequenceFinish(
        finish.index,
        reason,
        finish.stop_token_id if finish.HasField("stop_token_id") else None,
        finish.num_output_tokens,
        finish.cumulative_logprob if finish.HasField("cumulative_logprob") else None,
        finish.score if finish.HasField("score") else None,
    )


def decode_finish(finish: scheduler_pb2.Finish) -> Finish:
    """Decodes the end of a request. Raises the error of a failed request."""
    reason = _FINISH_REASONS.get(finish.reason)
    if reason is None:
        raise decode_error(finish.error)
    usage = finish.usage
    return Finish(
        reason,
        finish.stop_token_id if finish.HasField("stop_token_id") else None,
        Usage(
            usage.num_prompt_tokens,
            usage.num_output_tokens,
            usage.num_cached_tokens,
            usage.num_preemptions,
        ),
        _decode_vector(finish.vector) if finish.vector else None,
    )


def _decode_vector(column: bytes) -> array[float]:
    """Decodes float32 numbers. Raises RequestFailed if bytes are missing."""
    numbers = array("f")
    if len(column) % numbers.itemsize:
        raise RequestFailed(f"a vector has {len(column)} bytes; allowed: multiples of 4")
    numbers.frombytes(column)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def decode_event(
    message: scheduler_pb2.GenerateResponse | scheduler_pb2.SessionEvent,
) -> Tokens | Finish:
    """Decodes one event of a request. Raises the error of a failed request."""
    match message.WhichOneof("event"):
        case "tokens":
            return decode_tokens(message.tokens)
        case "sequence_finish":
            finish = decode_sequence_finish(message.sequence_finish)
            return Tokens((), index=finish.index, finish=finish)
        case _:
            return decode_finish(message.finish)


def decode_error(error: scheduler_pb2.RequestError) -> SplitserveError:
    """Decodes an error that the server reported in-band."""
    delay_s = None
    if error.HasField("retry_delay"):
        delay_s = error.retry_delay.ToTimedelta().total_seconds()
    message, schedulers = error.message or "the request failed", tuple(error.schedulers)
    return error_of_reason(error.reason, message, delay_s, schedulers)


def decode_model(model: scheduler_pb2.GetModelResponse) -> Model:
    """Decodes the served model."""
    return Model(
        model.name,
        model.digest,
        model.dtype,
        model.vocab_size,
        model.max_model_len_tokens,
        tuple(model.eos_token_ids),
        _decode_default_sampling(model.default_sampling_params),
        _READINESS.get(model.readiness, Readiness.UNKNOWN),
        model.quantization,
        _decode_encoder(model.encoder) if model.HasField("encoder") else None,
        _decode_pooling(model.pooling) if model.HasField("pooling") else None,
        model.max_kept_duration.ToTimedelta().total_seconds(),
    )


def _decode_pooling(pooling: scheduler_pb2.PoolingInfo) -> Pooling:
    return Pooling(pooling.embedding_size, tuple(pooling.labels))


def _decode_encoder(encoder: scheduler_pb2.EncoderInfo) -> Encoder:
    audio = None
    if encoder.HasField("audio"):
        values = {each.name: getattr(encoder.audio, each.name) for each in fields(AudioInput)}
        audio = AudioInput(**values)
    return Encoder(encoder.max_tokens, tuple(encoder.decoder_token_ids), audio)


def decode_identity(response: scheduler_pb2.IdentifyResponse) -> Identity:
    """Decodes the owner of a credential."""
    return Identity(
        response.knows_callers,
        response.caller,
        response.tenant,
        frozenset(response.scopes),
        response.may_use_model,
    )


def decode_adapter(info: scheduler_pb2.AdapterInfo) -> Adapter:
    """Decodes a registered adapter."""
    return Adapter(info.name, info.path, info.digest, info.base_model)


def _decode_default_sampling(params: scheduler_pb2.SamplingParams) -> SamplingParams:
    """Decodes recommended sampling parameters; only numbers are recommended, never lists."""
    numbers = {
        field.name: value
        for field, value in params.ListFields()
        if field.has_presence and field.message_type is None
    }
    known = {field.name for field in fields(SamplingParams)}
    return SamplingParams(**{name: numbers[name] for name in known & numbers.keys()})


def decode_executors(response: admin_pb2.ListExecutorsResponse) -> ExecutorList:
    """Decodes the list of executors."""
    executors = tuple(map(_decode_executor, response.executors))
    has_contract = response.HasField("contract_version")
    return ExecutorList(
        executors,
        response.num_unassigned_requests,
        response.num_unfitting_requests,
        response.now.ToNanoseconds() / 1e9 if response.HasField("now") else None,
        response.software_version,
        _decode_contract(response.contract_version) if has_contract else None,
    )


def _decode_contract(version: executor_pb2.ContractVersion) -> tuple[int, int]:
    return version.major, version.minor


def _decode_executor(state: admin_pb2.ExecutorState) -> Executor:
    info = state.executor
    return Executor(
        address=info.address,
        executor_epoch=info.executor_epoch,
        is_connected=state.connected,
        model_name=info.model.name,
        dtype=info.model.dtype,
        block_size=info.block_size_tokens,
        num_device_blocks=info.num_device_blocks,
        num_host_blocks=info.num_host_blocks,
        is_draining=state.draining,
        model_digest=info.model.digest,
        software_version=info.software_version,
        contract_version=_decode_contract(info.contract_version),
        block_bytes=info.block_bytes,
        compute=info.compute,
        slow_compute_reason=info.slow_compute_reason,
        is_failing=state.failing,
        is_withdrawn=state.withdrawn,
        **{name: getattr(state, name) for name in _EXECUTOR_STATE},
    )


def _decode_logprob(score: scheduler_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple(TopLogprob(entry.token_id, entry.logprob) for entry in score.top)
    return TokenLogprob(score.token_id, score.logprob, score.rank, top)
