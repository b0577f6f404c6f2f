from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LiveState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIVE_STATE_UNSPECIFIED: _ClassVar[LiveState]
    LIVE_STATE_SERVING: _ClassVar[LiveState]
    LIVE_STATE_LATE: _ClassVar[LiveState]
    LIVE_STATE_DRAINING: _ClassVar[LiveState]
    LIVE_STATE_DISCONNECTED: _ClassVar[LiveState]
    LIVE_STATE_WITHDRAWN: _ClassVar[LiveState]

class LiveLack(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIVE_LACK_UNSPECIFIED: _ClassVar[LiveLack]
    LIVE_LACK_TURN: _ClassVar[LiveLack]
    LIVE_LACK_EXECUTOR: _ClassVar[LiveLack]
    LIVE_LACK_FITTING_EXECUTOR: _ClassVar[LiveLack]
    LIVE_LACK_BLOCKS: _ClassVar[LiveLack]
    LIVE_LACK_ROWS: _ClassVar[LiveLack]
    LIVE_LACK_BYTES: _ClassVar[LiveLack]
    LIVE_LACK_SHARE: _ClassVar[LiveLack]
    LIVE_LACK_ADAPTER_SLOT: _ClassVar[LiveLack]
    LIVE_LACK_BUDGET: _ClassVar[LiveLack]
    LIVE_LACK_RESULTS: _ClassVar[LiveLack]
    LIVE_LACK_OPEN_EXECUTOR: _ClassVar[LiveLack]
    LIVE_LACK_OTHERS_FIRST: _ClassVar[LiveLack]
    LIVE_LACK_ADAPTER_LOAD: _ClassVar[LiveLack]
LIVE_STATE_UNSPECIFIED: LiveState
LIVE_STATE_SERVING: LiveState
LIVE_STATE_LATE: LiveState
LIVE_STATE_DRAINING: LiveState
LIVE_STATE_DISCONNECTED: LiveState
LIVE_STATE_WITHDRAWN: LiveState
LIVE_LACK_UNSPECIFIED: LiveLack
LIVE_LACK_TURN: LiveLack
LIVE_LACK_EXECUTOR: LiveLack
LIVE_LACK_FITTING_EXECUTOR: LiveLack
LIVE_LACK_BLOCKS: LiveLack
LIVE_LACK_ROWS: LiveLack
LIVE_LACK_BYTES: LiveLack
LIVE_LACK_SHARE: LiveLack
LIVE_LACK_ADAPTER_SLOT: LiveLack
LIVE_LACK_BUDGET: LiveLack
LIVE_LACK_RESULTS: LiveLack
LIVE_LACK_OPEN_EXECUTOR: LiveLack
LIVE_LACK_OTHERS_FIRST: LiveLack
LIVE_LACK_ADAPTER_LOAD: LiveLack

class WatchSchedulerRequest(_message.Message):
    __slots__ = ("frames_per_second",)
    FRAMES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    frames_per_second: int
    def __init__(self, frames_per_second: _Optional[int] = ...) -> None: ...

class WatchSchedulerResponse(_message.Message):
    __slots__ = ("unix_ms", "now_ms", "executors", "new_requests", "waiting", "num_waiting", "reasons", "num_quarantined", "forgets_requests", "history", "time_to_first_token")
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    NEW_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    FORGETS_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    unix_ms: int
    now_ms: int
    executors: _containers.RepeatedCompositeFieldContainer[LiveExecutor]
    new_requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    waiting: _containers.RepeatedScalarFieldContainer[int]
    num_waiting: int
    reasons: _containers.RepeatedCompositeFieldContainer[LiveReason]
    num_quarantined: int
    forgets_requests: bool
    history: _containers.RepeatedCompositeFieldContainer[LivePoint]
    time_to_first_token: LiveLatency
    def __init__(self, unix_ms: _Optional[int] = ..., now_ms: _Optional[int] = ..., executors: _Optional[_Iterable[_Union[LiveExecutor, _Mapping]]] = ..., new_requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., waiting: _Optional[_Iterable[int]] = ..., num_waiting: _Optional[int] = ..., reasons: _Optional[_Iterable[_Union[LiveReason, _Mapping]]] = ..., num_quarantined: _Optional[int] = ..., forgets_requests: bool = ..., history: _Optional[_Iterable[_Union[LivePoint, _Mapping]]] = ..., time_to_first_token: _Optional[_Union[LiveLatency, _Mapping]] = ...) -> None: ...

class LivePoint(_message.Message):
    __slots__ = ("start_ms", "num_tokens", "num_waiting", "time_to_first_token")
    START_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    start_ms: int
    num_tokens: int
    num_waiting: int
    time_to_first_token: LiveLatency
    def __init__(self, start_ms: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_waiting: _Optional[int] = ..., time_to_first_token: _Optional[_Union[LiveLatency, _Mapping]] = ...) -> None: ...

class LiveLatency(_message.Message):
    __slots__ = ("count", "p50_us", "p99_us")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_US_FIELD_NUMBER: _ClassVar[int]
    P99_US_FIELD_NUMBER: _ClassVar[int]
    count: int
    p50_us: int
    p99_us: int
    def __init__(self, count: _Optional[int] = ..., p50_us: _Optional[int] = ..., p99_us: _Optional[int] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("number", "request_id", "tenant", "num_prompt_tokens", "stop_len", "num_sequences", "priority", "submitted_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    tenant: str
    num_prompt_tokens: int
    stop_len: int
    num_sequences: int
    priority: int
    submitted_ms: int
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., stop_len: _Optional[int] = ..., num_sequences: _Optional[int] = ..., priority: _Optional[int] = ..., submitted_ms: _Optional[int] = ...) -> None: ...

class LiveExecutor(_message.Message):
    __slots__ = ("address", "life", "state", "running", "num_tokens", "num_computed", "swapped", "waiting", "num_waiting", "reason", "max_num_seqs", "num_in_flight", "num_steps", "num_preemptions", "steps", "device", "host")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    address: str
    life: int
    state: LiveState
    running: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_computed: _containers.RepeatedScalarFieldContainer[int]
    swapped: _containers.RepeatedScalarFieldContainer[int]
    waiting: _containers.RepeatedScalarFieldContainer[int]
    num_waiting: int
    reason: LiveReason
    max_num_seqs: int
    num_in_flight: int
    num_steps: int
    num_preemptions: int
    steps: _containers.RepeatedCompositeFieldContainer[LiveStep]
    device: LivePool
    host: LivePool
    def __init__(self, address: _Optional[str] = ..., life: _Optional[int] = ..., state: _Optional[_Union[LiveState, str]] = ..., running: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., num_computed: _Optional[_Iterable[int]] = ..., swapped: _Optional[_Iterable[int]] = ..., waiting: _Optional[_Iterable[int]] = ..., num_waiting: _Optional[int] = ..., reason: _Optional[_Union[LiveReason, _Mapping]] = ..., max_num_seqs: _Optional[int] = ..., num_in_flight: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[LiveStep, _Mapping]]] = ..., device: _Optional[_Union[LivePool, _Mapping]] = ..., host: _Optional[_Union[LivePool, _Mapping]] = ...) -> None: ...

class LivePool(_message.Message):
    __slots__ = ("num_blocks", "block_size", "changed", "states", "holders")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_size: int
    changed: _containers.RepeatedScalarFieldContainer[int]
    states: bytes
    holders: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., changed: _Optional[_Iterable[int]] = ..., states: _Optional[bytes] = ..., holders: _Optional[_Iterable[int]] = ...) -> None: ...

class LiveStep(_message.Message):
    __slots__ = ("step_id", "sent_ms", "round_trip_us", "compute_us", "rows", "kinds", "num_tokens", "num_rows", "num_sampled", "num_swapped_out", "num_swapped_in", "num_copied", "failed")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SENT_MS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    sent_ms: int
    round_trip_us: int
    compute_us: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    kinds: bytes
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_rows: int
    num_sampled: int
    num_swapped_out: int
    num_swapped_in: int
    num_copied: int
    failed: bool
    def __init__(self, step_id: _Optional[int] = ..., sent_ms: _Optional[int] = ..., round_trip_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ..., kinds: _Optional[bytes] = ..., num_tokens: _Optional[_Iterable[int]] = ..., num_rows: _Optional[int] = ..., num_sampled: _Optional[int] = ..., num_swapped_out: _Optional[int] = ..., num_swapped_in: _Optional[int] = ..., num_copied: _Optional[int] = ..., failed: bool = ...) -> None: ...

class LiveReason(_message.Message):
    __slots__ = ("address", "lack", "num_needed", "num_free")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LACK_FIELD_NUMBER: _ClassVar[int]
    NUM_NEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    address: str
    lack: LiveLack
    num_needed: int
    num_free: int
    def __init__(self, address: _Optional[str] = ..., lack: _Optional[_Union[LiveLack, str]] = ..., num_needed: _Optional[int] = ..., num_free: _Optional[int] = ...) -> None: ...
