"""Events of the scheduler as messages of the journal, and back."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from scheduler_service.core.plan import StepOutcome, StepStatus
from scheduler_service.fleet.executor_losses import LossCause
from scheduler_service.journal.params_codec import (
    NO_CONVERTERS,
    Converters,
    decode_config,
    decode_fields,
    encode_fields,
)
from scheduler_service.journal.request_codec import decode_request, encode_request
from scheduler_service.scheduler import events
from scheduler_service.step_codec import Received, ResultUnusable, decode_result
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import journal_pb2 as journal

# Events whose messages have fields of the same names, and what converts their values.
_PLAIN_EVENTS: Mapping[type[Any], tuple[str, Converters]] = MappingProxyType(
    {
        events.RequestAborted: ("request_aborted", NO_CONVERTERS),
        events.ExecutorConnected: ("executor_connected", NO_CONVERTERS),
        events.ExecutorDoubted: ("executor_doubted", NO_CONVERTERS),
        events.ExecutorDraining: ("executor_draining", NO_CONVERTERS),
        events.ExecutorDrainExpired: ("executor_drain_expired", NO_CONVERTERS),
        events.ExecutorUndrained: ("executor_undrained", NO_CONVERTERS),
        events.ExecutorLost: ("executor_lost", MappingProxyType({"cause": LossCause})),
        events.TenantsWeighed: ("tenants_weighed", MappingProxyType({"weights": dict})),
        events.Tick: ("tick", NO_CONVERTERS),
    }
)
_PLAIN_NAMES: Mapping[str, tuple[type[Any], Converters]] = MappingProxyType(
    {name: (kind, converters) for kind, (name, converters) in _PLAIN_EVENTS.items()}
)


def encode_event(
    event: events.Event, received: Received | None, entry: journal.JournalEntry
) -> None:
    """Sets the event of `entry`.

    `received`: the message that the outcome of a `StepCompleted` was decoded from.
    """
    match event:
        case events.StepCompleted():
            _encode_step_completed(event, received, entry.step_completed)
        case events.RequestSubmitted(request):
            entry.request_submitted.request.CopyFrom(encode_request(request))
        case events.ExecutorJoined():
            _encode_joined(event, entry.executor_joined)
        case _:
            name, _ = _PLAIN_EVENTS[type(event)]
            encode_fields(event, getattr(entry, name))


def decode_event(entry: journal.JournalEntry) -> events.Event:
    """Returns the event of `entry`. Raises ValueError or DecodeError if it makes no sense."""
    name = entry.WhichOneof("event")
    match name:
        case "step_completed":
            return _decode_step_completed(entry.step_completed)
        case "request_submitted":
            return events.RequestSubmitted(decode_request(entry.request_submitted.request))
        case "executor_joined":
            return _decode_joined(entry.executor_joined)
    if name not in _PLAIN_NAMES:
        raise ValueError(f"{name} is no event of a scheduler")
    kind, converters = _PLAIN_NAMES[name]
    event: events.Event = kind(**decode_fields(getattr(entry, name), converters))
    return event


def _encode_step_completed(
    event: events.StepCompleted, received: Received | None, message: journal.StepCompleted
) -> None:
    message.address = event.address
    if received is not None:
        message.result = received.result.SerializeToString()
        message.num_rows = received.num_rows
        return
    assert not event.was_sent, "the outcome of a step that was sent was decoded from a message"
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
