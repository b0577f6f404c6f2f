"""Mapping between domain errors and gRPC statuses, the only one in the project.

A domain error knows its reason and nothing of gRPC. Servicers do not catch it; the interceptor
turns it into a status with `ErrorInfo(reason, domain)`. Clients map back by reason, never by
message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from splitserve_common import printable
from splitserve_contract import DOMAIN, DomainError

CODE_OF_REASON: Mapping[str, grpc.StatusCode] = MappingProxyType(
    {
        "PROMPT_EMPTY": grpc.StatusCode.INVALID_ARGUMENT,
        "PROMPT_TOO_LONG": grpc.StatusCode.INVALID_ARGUMENT,
        "TOKEN_OUT_OF_RANGE": grpc.StatusCode.INVALID_ARGUMENT,
        "ENCODER_FEATURES_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "SAMPLING_PARAMS_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "SCHEDULING_PARAMS_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "NEVER_FITS_KV_CACHE": grpc.StatusCode.INVALID_ARGUMENT,
        "FEATURE_UNSUPPORTED": grpc.StatusCode.INVALID_ARGUMENT,
        "REQUEST_ID_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "SESSION_PROTOCOL": grpc.StatusCode.INVALID_ARGUMENT,
        "EXECUTOR_INFO_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "DRAIN_TIMEOUT_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "WATCH_RATE_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "ADAPTER_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "MESSAGE_UNDECODABLE": grpc.StatusCode.INVALID_ARGUMENT,
        "CALLER_UNKNOWN": grpc.StatusCode.UNAUTHENTICATED,
        "CALLER_NOT_ALLOWED": grpc.StatusCode.PERMISSION_DENIED,
        "REQUEST_ID_IN_USE": grpc.StatusCode.ALREADY_EXISTS,
        "ADAPTER_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
        "REQUEST_UNKNOWN": grpc.StatusCode.NOT_FOUND,
        "ADAPTER_UNKNOWN": grpc.StatusCode.NOT_FOUND,
        "OUTPUT_UNKNOWN": grpc.StatusCode.NOT_FOUND,
        "TOKENIZER_UNAVAILABLE": grpc.StatusCode.NOT_FOUND,
        "EXECUTOR_UNKNOWN": grpc.StatusCode.NOT_FOUND,
        "SERVICE_UNKNOWN": grpc.StatusCode.NOT_FOUND,
        "METHOD_UNKNOWN": grpc.StatusCode.UNIMPLEMENTED,
        "REGISTRY_BUSY": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_WATCHERS": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "ADAPTERS_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUOTA_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "MESSAGE_TOO_LARGE": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "STREAM_NOT_READ": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "MODEL_CHANGED": grpc.StatusCode.FAILED_PRECONDITION,
        "MODEL_NOT_READY": grpc.StatusCode.FAILED_PRECONDITION,
        "CONTRACT_VERSION_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
        "STALE_EPOCH": grpc.StatusCode.FAILED_PRECONDITION,
        "EXECUTOR_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
        "EXECUTOR_DRAINED": grpc.StatusCode.FAILED_PRECONDITION,
        "EXECUTOR_LEAVES": grpc.StatusCode.FAILED_PRECONDITION,
        "DRAIN_UNDONE": grpc.StatusCode.ABORTED,
        "MODEL_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
        "STREAM_SUPERSEDED": grpc.StatusCode.ABORTED,
        "EXECUTOR_UNREACHABLE": grpc.StatusCode.UNAVAILABLE,
        "SCHEDULER_UNREACHABLE": grpc.StatusCode.UNAVAILABLE,
        "DRAINING": grpc.StatusCode.UNAVAILABLE,
        "INVARIANT_BROKEN": grpc.StatusCode.INTERNAL,
    }
)
# A message may quote client input. A status has to fit into 8 KiB of headers, which contain the
# message twice, with up to twelve bytes per character.
_MAX_MESSAGE_CHARS = 400
_MAX_TRANSPORT_CHARS = 300
# Maximum number of schedulers in the ErrorInfo metadata of an error.
MAX_NAMED = 8
_SCHEDULERS = "schedulers"
# gRPC's prefix of the only informative part of its details.
_LAST_ERROR = "last error: "


@dataclass(frozen=True, slots=True)
class RpcFailure:
    """Failure of a call. `reason`: empty if the server gave none (transport errors).

    `retry_delay_s`: None without RetryInfo. `schedulers`: addresses of other schedulers in the
    error.
    """

    code: grpc.StatusCode
    reason: str
    message: str
    retry_delay_s: float | None
    schedulers: tuple[str, ...] = ()


def duration_from_s(seconds: float) -> duration_pb2.Duration:
    """Converts seconds to a protobuf Duration."""
    whole = int(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def status_of(error: DomainError) -> grpc.Status:
    """Returns the gRPC status of `error`, with ErrorInfo and, given a retry delay, RetryInfo."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.schedulers:
        info.metadata[_SCHEDULERS] = ",".join(error.schedulers[:MAX_NAMED])
    details = [_packed(info)]
    if error.retry_delay_s is not None:
        delay = duration_from_s(error.retry_delay_s)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    code: int = CODE_OF_REASON[error.reason].value[0]
    message = error.message
    if len(message) > _MAX_MESSAGE_CHARS:
        message = f"{message[:_MAX_MESSAGE_CHARS]}..."
    proto = status_pb2.Status(code=code, message=message, details=details)
    return rpc_status.to_status(proto)


def failure_of(error: grpc.RpcError) -> RpcFailure:
    """Converts the error of a failed call. Other servers than splitserve's give no reason."""
    reason, retry_delay_s, schedulers = "", None, ""
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason, schedulers = info.reason, info.metadata.get(_SCHEDULERS, "")
        elif detail.Unpack(retry):
            retry_delay_s = retry.retry_delay.ToTimedelta().total_seconds()
    named = tuple(filter(None, schedulers.split(",")[:MAX_NAMED]))
    return RpcFailure(error.code(), reason, error.details() or "", retry_delay_s, named)


def transport_details(error: grpc.RpcError) -> str:
    """Returns gRPC's reason for a failed connection, printable and of bounded length."""
    details = error.details() or ""
    return printable(details.rpartition(_LAST_ERROR)[2][:_MAX_TRANSPORT_CHARS])


def _packed(message: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    return packed
