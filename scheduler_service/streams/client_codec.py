"""Codec between the client API in protobuf and the values of the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from scheduler_service.adapters import RegisteredAdapter
from scheduler_service.scheduler.values import (
    MAX_FIRST_SUPPRESSED,
    BeamParams,
    Completion,
    EarlyStopping,
    FinishReason,
    Int32Array,
    PoolingParams,
    PoolingTask,
    Request,
    SamplingParams,
    SchedulingParams,
    ScoredToken,
    Sequence,
    TokenEvent,
    check_bad_words,
    check_num_texts,
    check_sizes,
)
from scheduler_service.step_codec import decode_grammar, decode_transcription
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import RECOMMENDED_PARAMETERS, DomainError
from splitserve_rpc import MAX_NAMED, duration_from_s

_FINISH_REASONS: Mapping[FinishReason, api.FinishReason] = MappingProxyType(
    {
        FinishReason.STOP: api.FINISH_REASON_STOP,
        FinishReason.LENGTH: api.FINISH_REASON_LENGTH,
        FinishReason.MODEL_LENGTH: api.FINISH_REASON_MODEL_LENGTH,
        FinishReason.ABORTED: api.FINISH_REASON_ABORTED,
        FinishReason.ERROR: api.FINISH_REASON_ERROR,
    }
)
_EARLY_STOPPING: Mapping[int, EarlyStopping] = MappingProxyType(
    {
        api.BEAM_EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
        api.BEAM_EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
        api.BEAM_EARLY_STOPPING_ALWAYS: EarlyStopping.ALWAYS,
        api.BEAM_EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
    }
)
_POOLING_TASKS: Mapping[int, PoolingTask] = MappingProxyType(
    {
        api.POOLING_TASK_UNSPECIFIED: PoolingTask.DEFAULT,
        api.POOLING_TASK_EMBEDDING: PoolingTask.EMBEDDING,
        api.POOLING_TASK_SCORES: PoolingTask.SCORES,
    }
)
# Fields of the client's SamplingParams that do not map by name to those of the scheduler.
_NOT_BY_NAME = frozenset({"seed", "beam_search", "pooling"})
_CONVERTERS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "logit_bias": dict,
        "stop_token_ids": frozenset,
        "allowed_token_ids": frozenset,
        "bad_words_token_ids": lambda sequences: tuple(tuple(s.token_ids) for s in sequences),
        "grammar": decode_grammar,
        "transcription": decode_transcription,
    }
)
_MAX_PRIORITY = 100
_MAX_TARGET_ITL_MS = 60_000
_MAX_NAME_CHARS = 128
# Limits of the cache of decoded sampling parameters: bytes of each message, and number of entries.
_MAX_KEPT_BYTES = 256
_MAX_NUM_KEPT = 256
_NO_TOKENS: Int32Array = np.empty(0, np.int32)
# Largest time in int64 ns. A Duration holds ten thousand years, int64 ns less than three hundred.
_LAST_NS = 2**63 - 1


# -- from clients to the scheduler -------------------------------------------------------------


def decode_sampling_params(message: api.SamplingParams) -> SamplingParams:
    """Decodes the client's sampling parameters, except the seed.

    Raises DomainError for an unknown enum value or too long a list. Other fields are not validated
    yet.
    """
    check_sizes(message)
    check_bad_words([len(tokens.token_ids) for tokens in message.bad_words_token_ids])
    if message.HasField("grammar"):
        _check_kind(message.grammar)
    if (count := len(message.transcription.first_suppressed_token_ids)) > MAX_FIRST_SUPPRESSED:
        raise _unusable(
            f"transcription.first_suppressed_token_ids has {count} entries; allowed: at most"
            f" {MAX_FIRST_SUPPRESSED}"
        )
    given = {
        field.name: _CONVERTERS[field.name](value) if field.name in _CONVERTERS else value
        for field, value in message.ListFields()
        if field.name not in _NOT_BY_NAME
    }
    beam = _decode_beams(message.beam_search) if message.HasField("beam_search") else None
    pooling = _decode_pooling(message.pooling) if message.HasField("pooling") else None
    return SamplingParams(**given, beam=beam, pooling=pooling)


class SamplingDecoder:
    """Decoder of sampling parameters, which clients repeat: decodes small equal messages once."""

    def __init__(self) -> None:
        self._known: dict[bytes, SamplingParams] = {}

    def decode(self, message: api.SamplingParams) -> SamplingParams:
        """Decodes as `decode_sampling_params`; equal messages may give the same object."""
        if message.HasField("seed") or _has_parts(message) or message.ByteSize() > _MAX_KEPT_BYTES:
            return decode_sampling_params(message)
        data = message.SerializeToString()
        params = self._known.get(data)
        if params is None:
            params = decode_sampling_params(message)
            if len(self._known) >= _MAX_NUM_KEPT:
                self._known.clear()
            self._known[data] = params
        return params


def _has_parts(message: api.SamplingParams) -> bool:
    """Returns whether a message has lists or texts of unchecked length.

    Even asking for the size of such a message copies them.
    """
    return bool(
        message.logit_bias
        or message.stop_token_ids
        or message.allowed_token_ids
        or message.bad_words_token_ids
        or message.HasField("grammar")
        or message.HasField("transcription")
    )


def _check_kind(grammar: api.Grammar) -> None:
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise _unusable("grammar has no kind; allowed: json_schema, regex, lark or choices")
    if kind == "choices":
        check_num_texts(len(grammar.choices.texts))


def _decode_beams(message: api.BeamSearch) -> BeamParams:
    if message.early_stopping not in _EARLY_STOPPING:
        raise DomainError(
            "SAMPLING_PARAMS_INVALID",
            f"beam_search.early_stopping is {message.early_stopping}; allowed: 0 to 3",
        )
    return BeamParams(
        message.width,
        message.length_penalty if message.HasField("length_penalty") else 1.0,
        _EARLY_STOPPING[message.early_stopping],
    )


def _decode_pooling(message: api.PoolingParams) -> PoolingParams:
    if message.task not in _POOLING_TASKS:
        raise _unusable(f"pooling.task is {message.task}; allowed: 0 to {len(_POOLING_TASKS) - 1}")
    return PoolingParams(
        _POOLING_TASKS[message.task],
        message.num_dimensions,
        message.raw,
        message.second_text_start,
    )


def check_names(message: api.GenerateRequest) -> None:
    """Raises DomainError(SCHEDULING_PARAMS_INVALID) for names that are too long to be quoted."""
    for name in ("tenant", "adapter", "cache_salt"):
        if len(getattr(message, name)) > _MAX_NAME_CHARS:
            length = len(getattr(message, name))
            raise _invalid(f"{name} has {length} characters; allowed: at most {_MAX_NAME_CHARS}")


def decode_scheduling_params(
    message: api.GenerateRequest, now_ns: int, tenant: str
) -> SchedulingParams:
    """Decodes the scheduling parameters of a request for `tenant`; `now_ns`: base of the deadline.

    Raises DomainError(SCHEDULING_PARAMS_INVALID).
    """
    deadline_ns = None
    if message.HasField("deadline"):
        remaining_ns = message.deadline.ToNanoseconds()
        if remaining_ns <= 0:
            raise _invalid(f"deadline is {remaining_ns / 1e9:g} s; allowed: more than 0")
        deadline_ns = min(now_ns + remaining_ns, _LAST_NS)
    if abs(message.priority) > _MAX_PRIORITY:
        raise _invalid(
            f"priority is {message.priority}; allowed: {-_MAX_PRIORITY} to {_MAX_PRIORITY}"
        )
    check_names(message)
    num_public = message.num_public_prefix_tokens
    if num_public < 0:
        raise _invalid(f"num_public_prefix_tokens is {num_public}; allowed: 0 or more")
    target_ms = message.target_itl_ms if message.HasField("target_itl_ms") else None
    if target_ms is not None and not 1 <= target_ms <= _MAX_TARGET_ITL_MS:
        raise _invalid(f"target_itl_ms is {target_ms}; allowed: 1 to {_MAX_TARGET_ITL_MS}")
    return SchedulingParams(
        priority=message.priority,
        tenant=tenant,
        deadline_ns=deadline_ns,
        adapter=message.adapter,
        cache_salt=message.cache_salt,
        uses_prefix_cache=not message.bypass_prefix_cache,
        num_public_prefix_tokens=num_public,
        target_itl_ms=target_ms,
    )


def decode_token_ids(token_ids: Collection[int]) -> Int32Array:
    """Returns a field of tokens as an array, which numpy copies where protobuf (7) lets it."""
    if not token_ids:
        return _NO_TOKENS
    return np.array(token_ids, dtype=np.int32)


def decode_resumed(message: api.GenerateRequest, params: SamplingParams) -> list[Int32Array]:
    """Returns the output tokens that each sequence resumes with; empty for a request that is new.

    Raises DomainError(SAMPLING_PARAMS_INVALID).
    """
    if not message.resume_sequences and not message.resume_token_ids:
        return []
    if not params.is_streamed:
        raise _unusable("resume tokens are allowed only for requests whose tokens are streamed")
    if not message.resume_sequences:
        if params.num_sequences > 1:
            raise _unusable("resume_token_ids is for one sequence; use resume_sequences")
        return [decode_token_ids(message.resume_token_ids)]
    if message.resume_token_ids:
        raise _unusable("resume_token_ids and resume_sequences exclude each other")
    resumed = [decode_token_ids(()) for _ in range(params.num_sequences)]
    seen: set[int] = set()
    for sequence in message.resume_sequences:
        if not 0 <= sequence.index < len(resumed) or sequence.index in seen:
            raise _unusable(
                f"resume_sequences has index {sequence.index}; allowed: each of 0 to "
                f"{len(resumed) - 1} once"
            )
        seen.add(sequence.index)
        resumed[sequence.index] = decode_token_ids(sequence.token_ids)
    return resumed


def _invalid(message: str) -> DomainError:
    return DomainError("SCHEDULING_PARAMS_INVALID", message)


def _unusable(message: str) -> DomainError:
    return DomainError("SAMPLING_PARAMS_INVALID", message)


# -- from the scheduler to clients -------------------------------------------------------------


def encode_default_sampling(params: executor.SamplingParams) -> api.SamplingParams | None:
    """Encodes the sampling defaults of an executor's model; None if there are none.

    Leaves out values that requests may not ask for.
    """
    defaults = api.SamplingParams()
    for parameter in RECOMMENDED_PARAMETERS:
        name = parameter.name
        if params.HasField(name) and parameter.accepts(getattr(params, name)):
            setattr(defaults, name, getattr(params, name))
    return defaults if defaults.ListFields() else None


def encode_adapter(adapter: RegisteredAdapter) -> api.AdapterInfo:
    """Encodes a registered adapter."""
    return api.AdapterInfo(
        name=adapter.name,
        path=str(adapter.path),
        digest=adapter.digest,
        base_model=adapter.base_model,
    )


def encode_token(event: TokenEvent) -> api.TokenChunk:
    """Encodes a token with scores, or of one of several sequences."""
    scored = () if event.scored is None else (event.scored,)
    return api.TokenChunk(
        token_ids=(event.token_id,), logprobs=_scores(scored), index=event.sequence.index
    )


def encode_prompt_scores(scored: Iterable[ScoredToken]) -> api.TokenChunk:
    """Encodes the logprobs of the next prompt tokens."""
    return api.TokenChunk(prompt_logprobs=_scores(scored))


def encode_output(sequence: Sequence) -> api.TokenChunk:
    """Encodes all output tokens of a sequence that does not run yet, without scores."""
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    return api.TokenChunk(token_ids=output.tolist(), index=sequence.index)


def encode_completion(completion: Completion, index: int) -> api.TokenChunk:
    """Encodes the tokens of one of the best completions, with scores if the completion has any."""
    return api.TokenChunk(
        token_ids=completion.token_ids, logprobs=_scores(completion.scored), index=index
    )


def _scores(scored: Iterable[ScoredToken]) -> list[api.TokenLogprob]:
    return [
        api.TokenLogprob(
            token_id=token.token_id,
            logprob=token.logprob,
            rank=token.rank,
            top=[api.TopLogprob(token_id=top_id, logprob=logprob) for top_id, logprob in token.top],
        )
        for token in scored
    ]


def encode_sequence_finish(sequence: Sequence) -> api.SequenceFinish:
    """Encodes the end of one of several streamed sequences."""
    assert sequence.finish_reason is not None
    return api.SequenceFinish(
        index=sequence.index,
        reason=_FINISH_REASONS[sequence.finish_reason],
        stop_token_id=sequence.stop_token_id,
        num_output_tokens=sequence.num_output_tokens,
    )


def encode_completion_finish(completion: Completion, index: int) -> api.SequenceFinish:
    """Encodes the end of one of the best completions."""
    return api.SequenceFinish(
        index=index,
        reason=_FINISH_REASONS[completion.finish_reason],
        stop_token_id=completion.stop_token_id,
        num_output_tokens=len(completion.token_ids),
        cumulative_logprob=completion.cumulative_logprob,
        score=completion.score,
    )


def encode_finish(request: Request) -> api.Finish:
    """Encodes the end of a finished request."""
    assert request.finish_reason is not None
    finish = api.Finish(
        reason=_FINISH_REASONS[request.finish_reason],
        stop_token_id=_stop_token_id(request),
        usage=api.Usage(
            num_prompt_tokens=request.sequence.num_prompt_tokens,
            num_output_tokens=_num_output_tokens(request),
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
        ),
        vector=request.vector,
    )
    if request.error is not None:
        finish.error.reason, finish.error.message = request.error
    return finish


def _stop_token_id(request: Request) -> int | None:
    if request.finish_reason is not FinishReason.STOP:
        return None
    if request.completions:
        return request.completions[0].stop_token_id
    return request.sequence.stop_token_id


def _num_output_tokens(request: Request) -> int:
    """Returns the number of output tokens returned; all of a request that ended early."""
    if request.completions:
        return sum(len(completion.token_ids) for completion in request.completions)
    return sum(sequence.num_output_tokens for sequence in request.sequences)


def encode_rejection(error: DomainError) -> api.RequestError:
    """Encodes the refusal of a request as a message of the stream."""
    message = api.RequestError(reason=error.reason, message=error.message)
    message.schedulers.extend(error.schedulers[:MAX_NAMED])
    if error.retry_delay_s is not None:
        message.retry_delay.CopyFrom(duration_from_s(error.retry_delay_s))
    return message
