"""Codec of requests in the journal, complete enough for another engine to continue a request.

The last part encodes and decodes dataclasses whose messages have fields of the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from scheduler_service.scheduler.values import (
    BatchPolicyName,
    BeamParams,
    BeamSearch,
    BeamState,
    EarlyStopping,
    EncoderFeatures,
    Feature,
    FinishReason,
    FleetConfig,
    Grammar,
    Int32Array,
    PolicyConfig,
    PoolingParams,
    PoolingTask,
    PreemptionMode,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
    ScoredToken,
    SearchState,
    Sequence,
    SequenceStatus,
    Speculation,
    VectorSizes,
)
from scheduler_service.step_codec import decode_grammar, decode_transcription, encode_grammar
from splitserve.scheduler.v1 import journal_pb2 as journal

# Fields with the same name and value in `Request` and in its message.
PLAIN_FIELDS = (
    "request_id",
    "arrival",
    "client_key",
    "num_preemptions",
    "num_cached_tokens",
    "num_fruitless_losses",
    "num_tokens_at_loss",
    "trial_size",
    "num_trials_left",
    "was_in_flight",
    "num_prompt_logprobs_sent",
    "num_bypasses",
    "is_protected",
    "num_forks",
    "num_candidates",
)


def encode_request(request: Request) -> journal.JournaledRequest:
    """Encodes a request that no engine has."""
    first = request.sequence
    message = journal.JournaledRequest(
        prompt_token_ids=first.token_ids[: first.num_prompt_tokens].tobytes(),
        sequences=[_encode_sequence(sequence) for sequence in request.sequences],
        **{name: getattr(request, name) for name in PLAIN_FIELDS},
    )
    encode_fields(request.params, message.params)
    encode_fields(request.scheduling, message.scheduling)
    if request.encoder_token_ids is not None:
        message.encoder_token_ids = request.encoder_token_ids.tobytes()
    if request.encoder_features is not None:
        encode_fields(request.encoder_features, message.encoder_features)
    if request.submitted_ns is not None:
        message.submitted_ns = request.submitted_ns
    if request.search is not None:
        message.search.CopyFrom(_encode_search(request.search.state))
    return message


def decode_request(message: journal.JournaledRequest) -> Request:
    """Decodes a request. Raises ValueError if a value is invalid."""
    request = Request(
        params=decode_sampling_params(message.params),
        scheduling=decode_scheduling_params(message.scheduling),
        **{name: getattr(message, name) for name in PLAIN_FIELDS},
    )
    if message.HasField("encoder_token_ids"):
        request.encoder_token_ids = _tokens(message.encoder_token_ids)
    if message.HasField("encoder_features"):
        request.encoder_features = EncoderFeatures(**decode_fields(message.encoder_features))
    if message.HasField("submitted_ns"):
        request.submitted_ns = message.submitted_ns
    prompt = _tokens(message.prompt_token_ids)
    request.sequences = [_decode_sequence(s, request, prompt) for s in message.sequences]
    if not request.sequences:
        raise ValueError(f"request {request.request_id!r} has no sequence")
    if message.HasField("search"):
        request.search = BeamSearch.from_state(_decode_search(message.search, request))
    return request


# -- Sequences ---------------------------------------------------------------------------------


def _encode_sequence(sequence: Sequence) -> journal.JournaledSequence:
    reason = sequence.finish_reason
    return journal.JournaledSequence(
        index=sequence.index,
        output_token_ids=sequence.token_ids[sequence.num_prompt_tokens :].tobytes(),
        seed=sequence.seed,
        settles_at_step=sequence.settles_at_step,
        cumulative_logprob=sequence.cumulative_logprob,
        scored=[_encode_score(token) for token in sequence.scored],
        is_finished=sequence.status is SequenceStatus.FINISHED,
        finish_reason="" if reason is None else reason.value,
        stop_token_id=sequence.stop_token_id,
    )


def _decode_sequence(
    message: journal.JournaledSequence, request: Request, prompt: Int32Array
) -> Sequence:
    output = _tokens(message.output_token_ids)
    return Sequence(
        request,
        message.index,
        np.concatenate([prompt, output]) if len(output) else prompt,
        len(prompt),
        message.seed,
        SequenceStatus.FINISHED if message.is_finished else SequenceStatus.WAITING,
        settles_at_step=message.settles_at_step,
        cumulative_logprob=message.cumulative_logprob,
        scored=[_decode_score(token) for token in message.scored],
        finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
    )


def _encode_score(token: ScoredToken) -> journal.JournaledScore:
    return journal.JournaledScore(
        position=token.position,
        token_id=token.token_id,
        logprob=token.logprob,
        rank=token.rank,
        top_token_ids=[token_id for token_id, _ in token.top],
        top_logprobs=[logprob for _, logprob in token.top],
    )


def _decode_score(message: journal.JournaledScore) -> ScoredToken:
    top = list(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return ScoredToken(message.position, message.token_id, message.logprob, message.rank, top)


def _tokens(column: bytes) -> Int32Array:
    return np.frombuffer(column, np.int32)


# -- Beam search -------------------------------------------------------------------------------


def _encode_search(state: SearchState) -> journal.JournaledBeamSearch:
    return journal.JournaledBeamSearch(
        max_tokens=state.max_tokens,
        stop_token_ids=sorted(state.stop_token_ids),
        num_tokens=state.num_tokens,
        live=[_encode_beam(beam) for beam in state.live],
        ended=[_encode_beam(beam) for beam in state.ended],
    )


def _encode_beam(beam: BeamState) -> journal.JournaledBeam:
    return journal.JournaledBeam(
        token_ids=beam.token_ids, cumulative_logprob=beam.cumulative_logprob, score=beam.score
    )


def _decode_search(message: journal.JournaledBeamSearch, request: Request) -> SearchState:
    if request.params.beam is None:
        raise ValueError(
            f"request {request.request_id!r} has a beam search state without beam_search parameters"
        )
    return SearchState(
        request.params.beam,
        request.params.n,
        message.max_tokens,
        request.params.min_tokens,
        frozenset(message.stop_token_ids),
        message.num_tokens,
        [_decode_beam(beam) for beam in message.live],
        [_decode_beam(beam) for beam in message.ended],
    )


def _decode_beam(message: journal.JournaledBeam) -> BeamState:
    return BeamState(tuple(message.token_ids), message.cumulative_logprob, message.score)


# -- Dataclasses whose messages have fields of the same names --------------------------------------

Converters: TypeAlias = Mapping[str, Callable[[Any], Any]]
NO_CONVERTERS: Converters = MappingProxyType({})


def _encode_items(items: Iterable[object], field: Any) -> None:  # noqa: ANN401
    """Adds texts, or sequences of tokens, to a repeated field."""
    for item in items:
        if isinstance(item, str):
            field.append(item)
        else:
            field.add(token_ids=item)


def encode_fields(value: object, message: Message) -> None:
    """Sets all fields of `message` from the attributes of `value` with the same names."""
    message.SetInParent()
    for name, has_presence in _fields(message.DESCRIPTOR):
        part = getattr(value, name)
        if part is None:
            continue
        # A field without presence reads as empty when absent. A negative zero is not empty.
        if not part and not has_presence and not isinstance(part, float):
            continue
        if isinstance(part, Mapping):
            getattr(message, name).update(part)
        elif isinstance(part, frozenset):
            elements = [item.value if isinstance(item, Enum) else item for item in part]
            getattr(message, name).extend(sorted(elements))
        elif isinstance(part, tuple):
            _encode_items(part, getattr(message, name))
        elif isinstance(part, Grammar):
            encode_grammar(part, getattr(message, name))
        elif is_dataclass(part):
            encode_fields(part, getattr(message, name))
        else:
            setattr(message, name, part.value if isinstance(part, Enum) else part)


@cache
def _fields(kind: Descriptor) -> tuple[tuple[str, bool], ...]:
    """Returns (name, has presence) of each field of a message.

    Cached, because asking a descriptor takes longer than encoding a field.
    """
    return tuple((field.name, field.has_presence) for field in kind.fields)


def decode_fields(message: Message, converters: Converters = NO_CONVERTERS) -> dict[str, Any]:
    """Returns the values of all fields of `message` by name; None for an absent field.

    Only fields with presence can be absent. `converters`: functions by field name that convert the
    value.
    """
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        name = field.name
        if field.has_presence and not message.HasField(name):
            values[name] = None
        else:
            value = getattr(message, name)
            values[name] = converters[name](value) if name in converters else value
    return values


def decode_config(message: journal.CoreConfig) -> SchedulerConfig:
    """Decodes the configuration of an engine. Raises ValueError if a value is invalid."""
    return SchedulerConfig(**decode_fields(message, _CONFIG))


def decode_fleet_config(message: journal.FleetConfig) -> FleetConfig:
    """Decodes the configuration for requests that wait and move among executors."""
    return FleetConfig(**decode_fields(message, {"tenant_weights": dict}))


def decode_sampling_params(message: journal.JournaledSamplingParams) -> SamplingParams:
    """Decodes sampling parameters. Raises ValueError if a value is invalid."""
    return SamplingParams(**decode_fields(message, _SAMPLING))


def decode_scheduling_params(message: journal.JournaledSchedulingParams) -> SchedulingParams:
    """Decodes the scheduling parameters of a request."""
    return SchedulingParams(**decode_fields(message))


def _features(names: list[str]) -> frozenset[Feature]:
    return frozenset(map(Feature, names))


def _speculation(name: str) -> Speculation:
    """Decodes the speculation mode. Journals of earlier versions have an empty name for OFF."""
    return Speculation(name or Speculation.OFF)


def _beam(message: journal.JournaledBeamParams) -> BeamParams:
    return BeamParams(**decode_fields(message, {"early_stopping": EarlyStopping}))


_CONFIG: Converters = {
    "eos_token_ids": frozenset,
    "features": _features,
    "preemption_mode": PreemptionMode,
    "batch_policy": BatchPolicyName,
    "speculation": _speculation,
    "tenant_weights": dict,
    # Journals of earlier versions have none.
    "max_num_encoder_tokens": lambda most: most or PolicyConfig().max_num_encoder_tokens,
    "vectors": lambda message: VectorSizes(**decode_fields(message)),
}
_SAMPLING: Converters = {
    "logit_bias": dict,
    "stop_token_ids": frozenset,
    "beam": _beam,
    "allowed_token_ids": frozenset,
    "bad_words_token_ids": lambda messages: tuple(tuple(m.token_ids) for m in messages),
    "grammar": decode_grammar,
    "transcription": decode_transcription,
    "pooling": lambda message: PoolingParams(**decode_fields(message, {"task": PoolingTask})),
}
