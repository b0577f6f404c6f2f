"""Errors of the client.

SplitserveError
├── ServerUnreachable        no connection, or a lost one that did not return in time
├── DeadlineExceeded         the deadline of the request has passed
├── InvalidRequest           the request is not valid; `reason` says why
├── CallerUnknown            the credential is missing or not valid
├── CallerNotAllowed         the credential is valid but does not permit the call
├── RequestIdInUse           an unfinished request has this id
├── RequestUnknown           no unfinished request has this id
├── AdapterUnknown           no adapter of this name is registered
├── OutputUnknown            no output is kept under this key
├── AdapterExists            the name of an adapter has another folder
├── TokenizerUnavailable     the server offers no tokenizer
├── QueueFull                too many requests wait; retry after `retry_delay_s`
├── QuotaExceeded            a quota of the caller's tenant is used up; retry after `retry_delay_s`
├── StreamNotRead            the server dropped unread output; the stream is continued by itself
├── ModelNotReady            no executor has registered yet; retry after a pause
├── ModelChanged             the served model differs from the one the prompt was encoded for
├── Draining                 the server is shutting down; retry at another server
├── RequestFailed            an accepted request failed alone
│   └── DeadlineUnreachable  the request was ended early: it could not meet its deadline
├── ServerFault              internal error of the server; its log has the details
├── CredentialsUnusable      API key or TLS files of the client are not usable; nothing was sent
└── ChatTemplateFailed       the model's chat template does not accept the messages
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import grpc

from splitserve_rpc import CODE_OF_REASON, RpcFailure
from splitserve_text import InvalidRequest, SplitserveError, TokenizerUnavailable


class ServerUnreachable(SplitserveError):
    """Failure to connect, or to reconnect in time after a lost connection."""


class DeadlineExceeded(SplitserveError):
    """Reports that the deadline of the request has passed."""


class CallerUnknown(SplitserveError):
    """Reports that the credential is missing or not valid."""


class CallerNotAllowed(SplitserveError):
    """Reports that the credential is valid but does not permit the call."""


class RequestIdInUse(SplitserveError):
    """Reports that an unfinished request has this id."""


class RequestUnknown(SplitserveError):
    """Reports that no unfinished request has this id."""


class AdapterUnknown(SplitserveError):
    """Reports that no adapter of this name is registered."""


class OutputUnknown(SplitserveError):
    """Reports that no output is kept under this key."""


class AdapterExists(SplitserveError):
    """Reports that an adapter of this name is registered, from another folder."""


class QueueFull(SplitserveError):
    """Reports that too many requests wait."""


class QuotaExceeded(SplitserveError):
    """Reports that a quota of the caller's tenant is used up."""


class StreamNotRead(SplitserveError):
    """Reports that the server ended an unread stream; it can be continued after its last output."""


class ModelNotReady(SplitserveError):
    """Reports that no executor has registered yet."""


class ModelChanged(SplitserveError):
    """Reports that the served model differs from the one the prompt was encoded for."""


class Draining(SplitserveError):
    """Reports that the server is shutting down.

    `schedulers`: addresses of other servers, if named.
    """

    schedulers: tuple[str, ...] = ()


class RequestFailed(SplitserveError):
    """Reports that an accepted request failed alone."""


class DeadlineUnreachable(RequestFailed):
    """Reports that the request could no longer meet its scheduling deadline and was ended early."""


class ServerFault(SplitserveError):
    """Reports an internal error of the server."""


class CredentialsUnusable(SplitserveError):
    """Reports that the client's API key or TLS files cannot be used."""


_ERROR_OF_REASON: Mapping[str, type[SplitserveError]] = MappingProxyType(
    {
        "CALLER_UNKNOWN": CallerUnknown,
        "CALLER_NOT_ALLOWED": CallerNotAllowed,
        "REQUEST_ID_IN_USE": RequestIdInUse,
        "REQUEST_UNKNOWN": RequestUnknown,
        "ADAPTER_UNKNOWN": AdapterUnknown,
        "OUTPUT_UNKNOWN": OutputUnknown,
        "ADAPTER_EXISTS": AdapterExists,
        "TOKENIZER_UNAVAILABLE": TokenizerUnavailable,
        "QUEUE_FULL": QueueFull,
        "QUOTA_EXCEEDED": QuotaExceeded,
        "STREAM_NOT_READ": StreamNotRead,
        "MESSAGE_TOO_LARGE": InvalidRequest,
        "MODEL_CHANGED": ModelChanged,
        "MODEL_NOT_READY": ModelNotReady,
        "DRAINING": Draining,
        "DEADLINE_UNREACHABLE": DeadlineUnreachable,
        "SCHEDULING_PARAMS_INVALID": InvalidRequest,
        "EXECUTOR_UNREACHABLE": ServerUnreachable,
    }
)
_ERROR_OF_CODE: Mapping[grpc.StatusCode, type[SplitserveError]] = MappingProxyType(
    {
        grpc.StatusCode.UNAVAILABLE: ServerUnreachable,
        # Without a reason, these codes do not come from the server: the call was cut on the way,
        # and gRPC's own state decides which of these codes it reports.
        grpc.StatusCode.CANCELLED: ServerUnreachable,
        grpc.StatusCode.INTERNAL: ServerUnreachable,
        grpc.StatusCode.UNKNOWN: ServerUnreachable,
        grpc.StatusCode.UNAUTHENTICATED: CallerUnknown,
        grpc.StatusCode.PERMISSION_DENIED: CallerNotAllowed,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
        # gRPC itself refuses a message far above the limit.
        grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,
    }
)


def error_of_reason(
    reason: str,
    message: str,
    retry_delay_s: float | None = None,
    schedulers: tuple[str, ...] = (),
) -> SplitserveError:
    """Returns the error for an in-band reason; RequestFailed for an unknown reason."""
    error = _ERROR_OF_REASON.get(reason)
    if error is None:
        code = CODE_OF_REASON.get(reason)
        error = InvalidRequest if code is grpc.StatusCode.INVALID_ARGUMENT else RequestFailed
    return _naming(error(message, reason, retry_delay_s), schedulers)


def error_of_failure(failure: RpcFailure) -> SplitserveError:
    """Returns the error for a failed call, by its reason or, without a reason, by its code."""
    if not failure.reason:
        error = _ERROR_OF_CODE.get(failure.code, ServerFault)
        message = f"{failure.code.name}: {failure.message or 'the server gave no message'}"
        return error(message, retry_delay_s=failure.retry_delay_s)
    error = _ERROR_OF_REASON.get(failure.reason, ServerFault)
    if failure.code is grpc.StatusCode.INVALID_ARGUMENT:
        error = InvalidRequest
    refusal = error(failure.message, failure.reason, failure.retry_delay_s)
    return _naming(refusal, failure.schedulers)


def _naming(error: SplitserveError, schedulers: tuple[str, ...]) -> SplitserveError:
    if isinstance(error, Draining):
        error.schedulers = schedulers
    return error
