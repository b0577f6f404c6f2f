"""Values whose messages in the journal have fields of the same names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from scheduler_service.core.config import (
    BatchPolicyName,
    Feature,
    FleetConfig,
    PreemptionMode,
    SchedulerConfig,
    Speculation,
)
from scheduler_service.core.grammar import Grammar
from scheduler_service.core.request import SchedulingParams
from scheduler_service.core.sampling_params import BeamParams, EarlyStopping, SamplingParams
from scheduler_service.grammar_codec import decode_grammar, encode_grammar
from splitserve.scheduler.v1 import journal_pb2 as journal

Converters: TypeAlias = Mapping[str, Callable[[Any], Any]]
NO_CONVERTERS: Converters = MappingProxyType({})


def encode_fields(value: object, message: Message) -> None:
    """Sets all fields of `message` from the attributes of `value` that have their names."""
    message.SetInParent()
    for name, has_presence in _fields(message.DESCRIPTOR):
        part = getattr(value, name)
        if part is None:
            continue
        # Without presence an absent field is an empty one. Negative zeros are not empty.
        if not part and not has_presence and not isinstance(part, float):
            continue
        if isinstance(part, Mapping):
            getattr(message, name).update(part)
        elif isinstance(part, frozenset):
            elements = [item.value if isinstance(item, Enum) else item for item in part]
            getattr(message, name).extend(sorted(elements))
        elif isinstance(part, tuple):
            for tokens in part:
                getattr(message, name).add(token_ids=tokens)
        elif isinstance(part, Grammar):
            encode_grammar(part, getattr(message, name))
        elif is_dataclass(part):
            encode_fields(part, getattr(message, name))
        else:
            setattr(message, name, part.value if isinstance(part, Enum) else part)


@cache
def _fields(kind: Descriptor) -> tuple[tuple[str, bool], ...]:
    """Names of the fields of a message, and whether each has presence.

    To ask a descriptor takes longer than to encode a field.
    """
    return tuple((field.name, field.has_presence) for field in kind.fields)


def decode_fields(message: Message, converters: Converters = NO_CONVERTERS) -> dict[str, Any]:
    """Values of all fields of `message` by name, None for one that is absent.

    `converters`: by name of the field, of those whose value is to be something else.
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
    """Raises ValueError if a value makes no sense."""
    return SchedulerConfig(**decode_fields(message, _CONFIG))


def decode_fleet_config(message: journal.FleetConfig) -> FleetConfig:
    """How requests wait and move among executors."""
    return FleetConfig(**decode_fields(message, {"tenant_weights": dict}))


def decode_sampling_params(message: journal.JournaledSamplingParams) -> SamplingParams:
    """Raises ValueError if a value makes no sense."""
    return SamplingParams(**decode_fields(message, _SAMPLING))


def decode_scheduling_params(message: journal.JournaledSchedulingParams) -> SchedulingParams:
    """What a request asked of the scheduler."""
    return SchedulingParams(**decode_fields(message))


def _features(names: list[str]) -> frozenset[Feature]:
    return frozenset(map(Feature, names))


def _speculation(name: str) -> Speculation:
    """Cores of earlier versions had none, and no name for it."""
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
}
_SAMPLING: Converters = {
    "logit_bias": dict,
    "stop_token_ids": frozenset,
    "beam": _beam,
    "allowed_token_ids": frozenset,
    "bad_words_token_ids": lambda messages: tuple(tuple(m.token_ids) for m in messages),
    "grammar": decode_grammar,
}
