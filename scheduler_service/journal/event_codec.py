"""Codec of the journal: events of the scheduler both ways, and effects one way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any
from zlib import crc32

import numpy as np

from scheduler_service.journal.request_codec import (
    NO_CONVERTERS,
    Converters,
    decode_config,
    decode_fields,
    decode_request,
    encode_fields,
    encode_request,
)
from scheduler_service.scheduler import LossCause, effects, events
from scheduler_service.scheduler.values import (
    Int32Array,
    Request,
    StepEvents,
    StepOutcome,
    StepStatus,
)
from scheduler_service.step_codec import (
    ReceivedResult,
    ResultUnusable,
    decode_part,
    decode_result,
)
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import journal_pb2 as journal
from splitserve_contract import DomainError

# Events whose messages have fields of the same names, and the converters of their values.
_PLAIN_EVENTS: Mapping[type[Any], tuple[str, Converters]] = MappingProxyType(
    {
        events.RequestAborted: ("request_aborted", NO_CONVERTERS),
        events.ExecutorConnected: ("executor_connected", NO_CONVERTERS),
        events.ExecutorDoubted: ("executor_doubted", NO_CONVERTERS),
        events.ExecutorDraining: ("executor_draining", NO_CONVERTERS),
        events.ExecutorDrainExpired: ("executor_drain_expired", NO_CONVERTERS),
        events.ExecutorUndrained: ("executor_undrained", NO_CONVERTERS),
        events.ExecutorLost: ("executor_lost", MappingProxyType({"cause": LossCause})),
        events.AdapterLoaded: ("adapter_loaded", NO_CONVERTERS),
        events.AdapterRegistered: ("adapter_registered", NO_CONVERTERS),
        events.TenantsWeighed: ("tenants_weighed", MappingProxyType({"weights": dict})),
        events.Tick: ("tick", NO_CONVERTERS),
    }
)
_PLAIN_NAMES: Mapping[str, tuple[type[Any], Converters]] = MappingProxyType(
    {name: (kind, converters) for kind, (name, converters) in _PLAIN_EVENTS.items()}
)


def encode_event(
    event: events.Event, received: ReceivedResult | None, entry: journal.JournalEntry
) -> None:
    """Sets the event of `entry`.

    `received`: message from which a `StepCompleted` or `StepProgressed` was decoded.
    """
    match event:
        case events.StepCompleted():
            _encode_step_completed(event, received, entry.step_completed)
        case events.StepProgressed(address):
            assert received is not None, "a part was received"
            entry.step_progressed.address = address
            entry.step_progressed.result = received.result.SerializeToString()
            entry.step_progressed.num_rows = received.num_rows
        case events.RequestSubmitted(request):
            entry.request_submitted.request.CopyFrom(encode_request(request))
        case events.ExecutorJoined():
            _encode_joined(event, entry.executor_joined)
        case _:
            name, _ = _PLAIN_EVENTS[type(event)]
            encode_fields(event, getattr(entry, name))


def decode_event(entry: journal.JournalEntry) -> events.Event:
    """Returns the event of `entry`. Raises ValueError or DecodeError if the event is invalid."""
    name = entry.WhichOneof("event")
    match name:
        case "step_completed":
            return _decode_step_completed(entry.step_completed)
        case "step_progressed":
            return _decode_step_progressed(entry.step_progressed)
        case "request_submitted":
            return events.RequestSubmitted(decode_request(entry.request_submitted.request))
        case "executor_joined":
            return _decode_joined(entry.executor_joined)
    if name not in _PLAIN_NAMES:
        raise ValueError(f"{name} is not an event of a scheduler")
    kind, converters = _PLAIN_NAMES[name]
    event: events.Event = kind(**decode_fields(getattr(entry, name), converters))
    return event


def _encode_step_completed(
    event: events.StepCompleted, received: ReceivedResult | None, message: journal.StepCompleted
) -> None:
    message.address = event.address
    if received is not None:
        message.result = received.result.SerializeToString()
        message.num_rows = received.num_rows
        return
    assert not event.was_sent, "a sent step needs its received result"
    message.unsent_step_id = event.outcome.step_id


def _decode_step_completed(message: journal.StepCompleted) -> events.StepCompleted:
    if not message.HasField("result"):
        outcome = StepOutcome(message.unsent_step_id, StepStatus.REFUSED)
        return events.StepCompleted(message.address, outcome, was_sent=False)
    result = executor.StepResult.FromString(message.result)
    try:
        outcome = decode_result(result, message.num_rows)
    except ResultUnusable as error:
        raise ValueError(str(error)) from error
    return events.StepCompleted(message.address, outcome)


def _decode_step_progressed(message: journal.StepProgressed) -> events.StepProgressed:
    result = executor.StepResult.FromString(message.result)
    try:
        return events.StepProgressed(message.address, decode_part(result, message.num_rows))
    except ResultUnusable as error:
        raise ValueError(str(error)) from error


def _encode_joined(event: events.ExecutorJoined, message: journal.ExecutorJoined) -> None:
    message.identity.address = event.address
    message.identity.executor_epoch = event.epoch
    message.identity.scheduler_epoch = event.scheduler_epoch
    encode_fields(event.config, message.config)
    message.num_credits = event.num_credits
    message.last_step_id = event.last_step_id


def _decode_joined(message: journal.ExecutorJoined) -> events.ExecutorJoined:
    return events.ExecutorJoined(
        message.identity.address,
        message.identity.executor_epoch,
        decode_config(message.config),
        message.num_credits,
        message.last_step_id,
        message.identity.scheduler_epoch,
    )


# -- Effects ---------------------------------------------------------------------------------------
#
# Effects are only compared by a replay. Long values are written as checksums. Texts for people are
# left out, since they may be reworded.

# Effects whose messages have fields of the same names.
_PLAIN_EFFECTS: Mapping[type[Any], str] = MappingProxyType(
    {
        effects.ExecutorServes: "executor_serves",
        effects.ExecutorHealthChanged: "executor_health_changed",
        effects.LoadAdapter: "load_adapter",
        effects.WakeAt: "wake_at",
    }
)


def encode_effect(
    effect: effects.Effect, message: journal.JournaledEffect, batch: bytes = b""
) -> None:
    """Fills the blank `message`. `batch`: encoded ScheduleBatch of a `SendStep`."""
    match effect:
        case effects.SendStep(address, _):
            message.send_step.address = address
            message.send_step.batch = batch
        case effects.DeliverTokens(events):
            _describe_delivery(events, message.deliver_tokens)
        case effects.ExecutorGone():
            message.executor_gone.CopyFrom(_describe_gone(effect))
        case effects.EngineFailed(address, call, error):
            message.engine_failed.address = address
            message.engine_failed.call = call
            message.engine_failed.error = describe_error(error)
        case (
            effects.ExecutorServes()
            | effects.ExecutorHealthChanged()
            | effects.LoadAdapter()
            | effects.WakeAt()
        ):
            encode_fields(effect, getattr(message, _PLAIN_EFFECTS[type(effect)]))
        case _:
            _encode_of_request(effect, message)


def _encode_of_request(effect: effects.Effect, message: journal.JournaledEffect) -> None:
    match effect:
        case effects.RequestAssigned(request, address, assignment):
            message.request_assigned.request_id = request.request_id
            message.request_assigned.address = address
            encode_fields(assignment, message.request_assigned.assignment)
        case effects.RequestFinished(request):
            message.request_finished.CopyFrom(_describe_end(request))
        case effects.RequestMoved(request, address, reason):
            message.request_moved.request.CopyFrom(_describe_state(request))
            message.request_moved.address = address
            message.request_moved.reason = reason.value
        case effects.RequestQuarantined(request):
            message.request_quarantined.request_id = request.request_id
            message.request_quarantined.num_trials_left = request.num_trials_left
        case effects.RequestAcquitted(request, reason):
            message.request_acquitted.request_id = request.request_id
            message.request_acquitted.reason = reason.value
        case effects.RequestBlamed(request):
            message.request_blamed.request_id = request.request_id
        case _:
            raise TypeError(f"{type(effect).__name__} has no message")


def describe_error(error: Exception) -> str:
    """Returns the class of an error, and the reason of a DomainError, without the message."""
    name = type(error).__name__
    return f"{name} {error.reason}" if isinstance(error, DomainError) else name


def _describe_delivery(events: StepEvents, message: journal.DeliverTokens) -> None:
    checksum = crc32(events.token_ids.data, crc32(events.client_keys.data))
    for event in events.tokens:
        request_id = event.sequence.request.request_id
        text = f"{request_id} {event.sequence.index} {event.token_id}"
        checksum = crc32(text.encode(), checksum)
    message.SetInParent()
    message.num_tokens = len(events.token_ids) + len(events.tokens)
    message.tokens_crc32 = checksum
    for _, scored in events.prompt_logprobs:
        message.num_prompt_logprobs += len(scored)
    for sequence in events.finished_sequences:
        message.finished_sequences.append(f"{sequence.request.request_id} {sequence.index}")
    for request in events.finished:
        message.finished.append(_describe_end(request))


def _describe_end(request: Request) -> journal.EndedRequest:
    assert request.finish_reason is not None
    checksum, num_tokens = crc32(request.vector), 0
    for tokens in _outputs(request):
        checksum = crc32(tokens.tobytes(), checksum)
        num_tokens += len(tokens)
    return journal.EndedRequest(
        request_id=request.request_id,
        finish_reason=request.finish_reason.value,
        error_reason=_error_reason(request),
        num_output_tokens=num_tokens,
        output_crc32=checksum,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
    )


def _outputs(request: Request) -> Iterable[Int32Array]:
    if request.params.pooling is not None:
        return []
    if request.completions:
        return [np.array(c.token_ids, np.int32) for c in request.completions]
    return [s.token_ids[s.num_prompt_tokens :] for s in request.sequences]


def _describe_gone(gone: effects.ExecutorGone) -> journal.ExecutorGone:
    return journal.ExecutorGone(
        address=gone.address,
        executor_epoch=gone.epoch,
        cause=gone.cause.value,
        requests=map(_describe_state, gone.requests),
        last_step_id=gone.last_step_id,
        is_drained=gone.is_drained,
        num_moved=gone.num_moved,
    )


def _describe_state(request: Request) -> journal.RequestState:
    return journal.RequestState(
        request_id=request.request_id,
        num_tokens=sum(len(sequence.token_ids) for sequence in request.sequences),
        error_reason=_error_reason(request),
        state_crc32=crc32(encode_request(request).SerializeToString(deterministic=True)),
    )


def _error_reason(request: Request) -> str:
    return "" if request.error is None else request.error[0]
