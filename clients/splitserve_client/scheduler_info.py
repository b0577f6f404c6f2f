"""Values that a scheduler reports: its model, its executors, and explanations of requests."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from splitserve.scheduler.v1 import admin_pb2
from splitserve_text import SamplingParams

_US_S = 1e6


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """Event in the life of a request, `at_s` after its first event.

    `kind` and `numbers` use the names of `LifeEvent` in admin.proto. `executor`, `reason` and
    `detail` may be empty.
    """

    at_s: float
    kind: str
    executor: str
    reason: str
    numbers: Mapping[str, int]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LifePart:
    """Part of a request's time; names are those of `LifePart` in admin.proto."""

    phase: str
    reason: str
    executor: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Reason why an executor cannot take a request."""

    executor: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequestLife:
    """History of a request.

    `began_at_s`: seconds since 1970, None if unknown. `parts`: longest first. `current`: the
    current part, None if the request ended. `num_events_left_out`: number of events missing in
    `events` after its first 16.
    """

    request_id: str
    tenant: str
    began_at_s: float | None
    duration_s: float
    is_unfinished: bool
    events: tuple[LifeEvent, ...]
    num_events_left_out: int
    parts: tuple[LifePart, ...]
    current: LifePart | None
    obstacles: tuple[Obstacle, ...]
    num_draft_tokens: int
    num_more_tokens: int
    num_accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Requests that match an id, and the size of the record.

    `lives`: requests that the id may mean, latest first. `num_living`, `num_ended`: requests on
    record. `num_kept_at_most`: limit of ended requests; 0 if no history is recorded.
    """

    lives: tuple[RequestLife, ...]
    near_request_ids: tuple[str, ...]
    num_living: int
    num_ended: int
    num_kept_at_most: int


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """Request near the front of the waiting queue."""

    request_id: str
    tenant: str
    obstacles: tuple[Obstacle, ...]


@dataclass(frozen=True, slots=True)
class QueueExplanation:
    """Reasons why the first unassigned requests wait.

    `num_executors`: number of executors that take requests.
    """

    first: tuple[WaitingRequest, ...]
    num_unassigned_requests: int
    num_executors: int


def decode_explanation(response: admin_pb2.ExplainResponse) -> Explanation:
    """Decodes the explanation of a request."""
    return Explanation(
        tuple(map(_decode_life, response.lives)),
        tuple(response.near_request_ids),
        response.num_living,
        response.num_ended,
        response.num_kept_at_most,
    )


def decode_queue(response: admin_pb2.ExplainQueueResponse) -> QueueExplanation:
    """Decodes the explanation of the waiting queue."""
    first = (
        WaitingRequest(each.request_id, each.tenant, _decode_obstacles(each.obstacles))
        for each in response.first
    )
    return QueueExplanation(tuple(first), response.num_unassigned_requests, response.num_executors)


def _decode_life(life: admin_pb2.RequestLife) -> RequestLife:
    has_time = life.HasField("began_at")
    return RequestLife(
        request_id=life.request_id,
        tenant=life.tenant,
        began_at_s=life.began_at.ToNanoseconds() / 1e9 if has_time else None,
        duration_s=life.duration_us / _US_S,
        is_unfinished=life.unfinished,
        events=tuple(
            LifeEvent(e.at_us / _US_S, e.kind, e.executor, e.reason, dict(e.numbers), e.detail)
            for e in life.events
        ),
        num_events_left_out=life.num_events_left_out,
        parts=tuple(map(_decode_part, life.parts)),
        current=_decode_part(life.current) if life.HasField("current") else None,
        obstacles=_decode_obstacles(life.obstacles),
        num_draft_tokens=life.num_draft_tokens,
        num_more_tokens=life.num_more_tokens,
        num_accepted_draft_tokens=life.num_accepted_draft_tokens,
    )


def _decode_part(part: admin_pb2.LifePart) -> LifePart:
    return LifePart(part.phase, part.reason, part.executor, part.duration_us / _US_S)


def _decode_obstacles(obstacles: Iterable[admin_pb2.ExecutorObstacle]) -> tuple[Obstacle, ...]:
    return tuple(Obstacle(each.executor, each.reason) for each in obstacles)


class Readiness(enum.Enum):
    """Readiness states of a scheduler, with reasons for not serving.

    UNKNOWN: not reported, or a newer reason.
    """

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    NO_EXECUTOR = "NO_EXECUTOR"
    NO_PROGRESS = "NO_PROGRESS"
    DRAINING = "DRAINING"
    EXECUTORS_FAILING = "EXECUTORS_FAILING"


@dataclass(frozen=True, slots=True)
class AudioInput:
    """Features of audio that an encoder takes; see `AudioInfo` in scheduler.proto."""

    num_mel_bins: int
    num_frames: int
    num_positions: int
    sampling_rate: int
    hop_length: int
    fft_length: int


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encoder of a model: requests need `encoder_token_ids`, at most `max_tokens`.

    `decoder_token_ids`: the prompt with which the decoder begins by the model's configuration;
    empty if that is unknown. `audio`: of a model whose requests need `encoder_features` instead;
    None for others.
    """

    max_tokens: int
    decoder_token_ids: tuple[int, ...]
    audio: AudioInput | None = None


@dataclass(frozen=True, slots=True)
class Pooling:
    """Vectors of a model that returns no tokens: requests need `SamplingParams.pooling`.

    `embedding_size`: 0 without embeddings. `labels`: names of the classifier's labels, in order of
    their scores; empty without a classifier.
    """

    embedding_size: int
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """Served model. Token ids are 0 .. vocab_size-1.

    `default_sampling_params`: recommendation of the model's authors, if any. Requests do not use it
    by default: pass `replace(model.default_sampling_params, max_tokens=100)` or
    `params.with_defaults(model.default_sampling_params)`. `readiness`: of the scheduler, at the
    time of the call. `quantization`: format of the quantised weights in the checkpoint; empty for
    plain ones. `encoder`: None for decoder-only models. `pooling`: None for models that return
    tokens. `max_kept_s`: longest time for which output is kept (`KeptOutput`); 0: none is kept.
    """

    name: str
    digest: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling_params: SamplingParams = field(default_factory=SamplingParams)
    readiness: Readiness = field(default=Readiness.UNKNOWN, compare=False)
    quantization: str = ""
    encoder: Encoder | None = None
    pooling: Pooling | None = None
    max_kept_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Registered LoRA adapter.

    `path`: folder or file at the scheduler. `digest`: of its files; empty until a request names the
    adapter. `base_model`: model that it was trained for, by its own statement; may be empty.
    """

    name: str
    path: str
    digest: str
    base_model: str


@dataclass(frozen=True, slots=True)
class Executor:
    """Executor as the scheduler sees it. `is_draining`: the executor is leaving.

    `compute`: implementation that computes, empty if not reported; `slow_compute_reason`: why it is
    not the fastest for the model, empty if it is. `is_failing`: steps or rows of the executor fail,
    whatever it is given; `is_withdrawn`: it gets no requests for that reason.
    """

    address: str
    executor_epoch: int
    is_connected: bool
    model_name: str
    dtype: str
    block_size: int
    num_device_blocks: int
    num_free_device_blocks: int
    num_host_blocks: int
    num_waiting_requests: int
    num_running_requests: int
    num_steps: int
    num_preemptions: int
    num_swapped_requests: int
    num_free_host_blocks: int
    num_cached_device_blocks: int
    is_draining: bool
    model_digest: str = ""
    software_version: str = ""
    contract_version: tuple[int, int] = (0, 0)
    block_bytes: int = 0
    compute: str = ""
    slow_compute_reason: str = ""
    is_failing: bool = False
    is_withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class DrainedExecutor:
    """Result of draining an executor; `is_lost`: the executor was lost before it had finished.

    `num_moved_requests`: requests that continue on, or wait for, other executors.
    """

    num_moved_requests: int
    is_lost: bool


@dataclass(frozen=True, slots=True)
class Identity:
    """Owner of a credential.

    `knows_callers`: whether the server asks for credentials at all; the other fields describe this
    credential. `may_use_model`: whether its tenant may use the served model.
    """

    knows_callers: bool
    caller: str
    tenant: str
    scopes: frozenset[str]
    may_use_model: bool


@dataclass(frozen=True, slots=True)
class ExecutorList:
    """Executors in order of registration, and requests that no executor can be given.

    `num_unfitting_requests`: requests that no available executor could ever run. `now_s`: clock of
    the scheduler, seconds since 1970; earlier versions report neither clock nor version.
    """

    executors: tuple[Executor, ...]
    num_unassigned_requests: int
    num_unfitting_requests: int = 0
    now_s: float | None = None
    software_version: str = ""
    contract_version: tuple[int, int] | None = None
