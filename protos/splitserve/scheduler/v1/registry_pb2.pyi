from google.protobuf import duration_pb2 as _duration_pb2
from splitserve.executor.v1 import executor_pb2 as _executor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchAdapterRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class FetchAdapterResponse(_message.Message):
    __slots__ = ("file_name", "data")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    data: bytes
    def __init__(self, file_name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("address", "executor_epoch", "timeout")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    address: str
    executor_epoch: int
    timeout: _duration_pb2.Duration
    def __init__(self, address: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("executor",)
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    executor: _executor_pb2.ExecutorInfo
    def __init__(self, executor: _Optional[_Union[_executor_pb2.ExecutorInfo, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("scheduler_epoch", "contract_version")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    contract_version: _executor_pb2.ContractVersion
    def __init__(self, scheduler_epoch: _Optional[int] = ..., contract_version: _Optional[_Union[_executor_pb2.ContractVersion, _Mapping]] = ...) -> None: ...
