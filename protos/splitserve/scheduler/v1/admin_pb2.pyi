from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from splitserve.executor.v1 import executor_pb2 as _executor_pb2
from splitserve.scheduler.v1 import scheduler_pb2 as _scheduler_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "replace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replace: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replace: bool = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _scheduler_pb2.AdapterInfo
    def __init__(self, adapter: _Optional[_Union[_scheduler_pb2.AdapterInfo, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainExecutorRequest(_message.Message):
    __slots__ = ("address", "timeout")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    address: str
    timeout: _duration_pb2.Duration
    def __init__(self, address: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainExecutorResponse(_message.Message):
    __slots__ = ("num_moved_requests", "lost")
    NUM_MOVED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    num_moved_requests: int
    lost: bool
    def __init__(self, num_moved_requests: _Optional[int] = ..., lost: bool = ...) -> None: ...

class UndrainExecutorRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class UndrainExecutorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListExecutorsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListExecutorsResponse(_message.Message):
    __slots__ = ("executors", "num_unassigned_requests", "num_unfitting_requests", "now", "software_version", "contract_version")
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNASSIGNED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNFITTING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorState]
    num_unassigned_requests: int
    num_unfitting_requests: int
    now: _timestamp_pb2.Timestamp
    software_version: str
    contract_version: _executor_pb2.ContractVersion
    def __init__(self, executors: _Optional[_Iterable[_Union[ExecutorState, _Mapping]]] = ..., num_unassigned_requests: _Optional[int] = ..., num_unfitting_requests: _Optional[int] = ..., now: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., software_version: _Optional[str] = ..., contract_version: _Optional[_Union[_executor_pb2.ContractVersion, _Mapping]] = ...) -> None: ...

class ExecutorState(_message.Message):
    __slots__ = ("executor", "connected", "num_waiting_requests", "num_running_requests", "num_free_device_blocks", "num_steps", "num_preemptions", "num_swapped_requests", "num_free_host_blocks", "num_cached_device_blocks", "draining", "failing", "withdrawn")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FAILING_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    executor: _executor_pb2.ExecutorInfo
    connected: bool
    num_waiting_requests: int
    num_running_requests: int
    num_free_device_blocks: int
    num_steps: int
    num_preemptions: int
    num_swapped_requests: int
    num_free_host_blocks: int
    num_cached_device_blocks: int
    draining: bool
    failing: bool
    withdrawn: bool
    def __init__(self, executor: _Optional[_Union[_executor_pb2.ExecutorInfo, _Mapping]] = ..., connected: bool = ..., num_waiting_requests: _Optional[int] = ..., num_running_requests: _Optional[int] = ..., num_free_device_blocks: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_swapped_requests: _Optional[int] = ..., num_free_host_blocks: _Optional[int] = ..., num_cached_device_blocks: _Optional[int] = ..., draining: bool = ..., failing: bool = ..., withdrawn: bool = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("lives", "near_request_ids", "num_living", "num_ended", "num_kept_at_most")
    LIVES_FIELD_NUMBER: _ClassVar[int]
    NEAR_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVING_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_AT_MOST_FIELD_NUMBER: _ClassVar[int]
    lives: _containers.RepeatedCompositeFieldContainer[RequestLife]
    near_request_ids: _containers.RepeatedScalarFieldContainer[str]
    num_living: int
    num_ended: int
    num_kept_at_most: int
    def __init__(self, lives: _Optional[_Iterable[_Union[RequestLife, _Mapping]]] = ..., near_request_ids: _Optional[_Iterable[str]] = ..., num_living: _Optional[int] = ..., num_ended: _Optional[int] = ..., num_kept_at_most: _Optional[int] = ...) -> None: ...

class RequestLife(_message.Message):
    __slots__ = ("request_id", "tenant", "began_at", "duration_us", "unfinished", "events", "num_events_left_out", "parts", "current", "obstacles", "num_draft_tokens", "num_more_tokens", "num_accepted_draft_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BEGAN_AT_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENTS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    OBSTACLES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_MORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    began_at: _timestamp_pb2.Timestamp
    duration_us: int
    unfinished: bool
    events: _containers.RepeatedCompositeFieldContainer[LifeEvent]
    num_events_left_out: int
    parts: _containers.RepeatedCompositeFieldContainer[LifePart]
    current: LifePart
    obstacles: _containers.RepeatedCompositeFieldContainer[ExecutorObstacle]
    num_draft_tokens: int
    num_more_tokens: int
    num_accepted_draft_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., began_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., duration_us: _Optional[int] = ..., unfinished: bool = ..., events: _Optional[_Iterable[_Union[LifeEvent, _Mapping]]] = ..., num_events_left_out: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[LifePart, _Mapping]]] = ..., current: _Optional[_Union[LifePart, _Mapping]] = ..., obstacles: _Optional[_Iterable[_Union[ExecutorObstacle, _Mapping]]] = ..., num_draft_tokens: _Optional[int] = ..., num_more_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class LifeEvent(_message.Message):
    __slots__ = ("at_us", "kind", "executor", "reason", "numbers", "detail")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    AT_US_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    at_us: int
    kind: str
    executor: str
    reason: str
    numbers: _containers.ScalarMap[str, int]
    detail: str
    def __init__(self, at_us: _Optional[int] = ..., kind: _Optional[str] = ..., executor: _Optional[str] = ..., reason: _Optional[str] = ..., numbers: _Optional[_Mapping[str, int]] = ..., detail: _Optional[str] = ...) -> None: ...

class LifePart(_message.Message):
    __slots__ = ("phase", "reason", "executor", "duration_us")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    phase: str
    reason: str
    executor: str
    duration_us: int
    def __init__(self, phase: _Optional[str] = ..., reason: _Optional[str] = ..., executor: _Optional[str] = ..., duration_us: _Optional[int] = ...) -> None: ...

class ExecutorObstacle(_message.Message):
    __slots__ = ("executor", "reason")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    executor: str
    reason: str
    def __init__(self, executor: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ExplainQueueRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExplainQueueResponse(_message.Message):
    __slots__ = ("first", "num_unassigned_requests", "num_executors")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_UNASSIGNED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    first: _containers.RepeatedCompositeFieldContainer[WaitingRequest]
    num_unassigned_requests: int
    num_executors: int
    def __init__(self, first: _Optional[_Iterable[_Union[WaitingRequest, _Mapping]]] = ..., num_unassigned_requests: _Optional[int] = ..., num_executors: _Optional[int] = ...) -> None: ...

class WaitingRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "obstacles")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OBSTACLES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    obstacles: _containers.RepeatedCompositeFieldContainer[ExecutorObstacle]
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., obstacles: _Optional[_Iterable[_Union[ExecutorObstacle, _Mapping]]] = ...) -> None: ...
