"""What may happen to a request, and the parts of its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

NO_NUMBERS: Mapping[str, int] = MappingProxyType({})


class LifeKind(Enum):
    """What happened.

    In this order, if nothing is in the way: RECEIVED, GIVEN (to an executor, which has not begun
    it), BEGAN, FIRST_TOKEN, ENDED. WAITS: for another reason than before. PREEMPTED gave up its KV,
    SWAPPED_OUT has it in the host pool. KV_LOST: a step failed that it leaned on. TAKEN_BACK: from
    an executor that is there, EXECUTOR_LOST: from one that is not. QUARANTINED: executors may have
    died of it, and it is tried alone from now on; ACQUITTED: it no longer is. RESUMED: the first
    token since.
    """

    REFUSED = "refused"
    RECEIVED = "received"
    WAITS = "waits"
    GIVEN = "given"
    BEGAN = "began"
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"
    SWAPPED_OUT = "swapped_out"
    SWAPPED_IN = "swapped_in"
    KV_LOST = "kv_lost"
    TAKEN_BACK = "taken_back"
    EXECUTOR_LOST = "executor_lost"
    QUARANTINED = "quarantined"
    ACQUITTED = "acquitted"
    RESUMED = "resumed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """`executor`: its address, empty where it is about none. `reason`: a constant name, or empty.

    `numbers`: by name, as `LifeRecorder` says them. `detail`: of a refusal, or an end by an error,
    what its client was told.
    """

    at_ns: int
    kind: LifeKind
    executor: str = ""
    reason: str = ""
    numbers: Mapping[str, int] = field(default_factory=lambda: NO_NUMBERS)
    detail: str = ""


class Phase(Enum):
    """Where a request is. QUEUED: no executor has it; GIVEN: one has, and did not begin it.

    PROMPT and TOKENS are computed; PROMPT also where tokens that were known are computed again.
    RECOVERING: an executor was lost or left that had begun it, and no other has begun it yet.
    """

    QUEUED = "queued"
    GIVEN = "given"
    PROMPT = "prompt"
    TOKENS = "tokens"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    RECOVERING = "recovering"


class Part(NamedTuple):
    """A part of a request's time: where it was, why it did not go on, and at which executor."""

    phase: Phase
    reason: str = ""
    executor: str = ""
