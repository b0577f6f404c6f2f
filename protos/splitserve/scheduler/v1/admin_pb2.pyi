from google.protobuf import duration_pb2 as _duration_pb2
from splitserve.executor.v1 import executor_pb2 as _executor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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

class ListExecutorsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListExecutorsResponse(_message.Message):
    __slots__ = ("executors", "num_unassigned_requests", "num_unfitting_requests")
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNASSIGNED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNFITTING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorState]
    num_unassigned_requests: int
    num_unfitting_requests: int
    def __init__(self, executors: _Optional[_Iterable[_Union[ExecutorState, _Mapping]]] = ..., num_unassigned_requests: _Optional[int] = ..., num_unfitting_requests: _Optional[int] = ...) -> None: ...

class ExecutorState(_message.Message):
    __slots__ = ("executor", "connected", "num_waiting_requests", "num_running_requests", "num_free_device_blocks", "num_steps", "num_preemptions", "num_swapped_requests", "num_free_host_blocks", "num_cached_device_blocks", "draining")
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
    def __init__(self, executor: _Optional[_Union[_executor_pb2.ExecutorInfo, _Mapping]] = ..., connected: bool = ..., num_waiting_requests: _Optional[int] = ..., num_running_requests: _Optional[int] = ..., num_free_device_blocks: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_swapped_requests: _Optional[int] = ..., num_free_host_blocks: _Optional[int] = ..., num_cached_device_blocks: _Optional[int] = ..., draining: bool = ...) -> None: ...
