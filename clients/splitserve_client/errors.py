"""Errors of the client.

SplitserveError
├── ServerUnreachable        no connection, or it broke and did not come back in time
├── DeadlineExceeded         the deadline given with the request has passed
├── InvalidRequest           the request is refused as it stands; `reason` says for what
├── CallerUnknown            no credential was given, or one that is not valid
├── CallerNotAllowed         the credential is valid, and not for this
├── RequestIdInUse           an unfinished request has this id
├── RequestUnknown           no unfinished request has this id
├── TokenizerUnavailable     the server offers no tokenizer
├── QueueFull                too many requests wait; again after `retry_delay_s`
├── QuotaExceeded            a limit of the caller's tenant; again after `retry_delay_s`
├── StreamNotRead            the server kept no more of what was not read; goes on by itself
├── ModelNotReady            no executor has registered yet; again after a pause
├── ModelChanged             another model is served than the prompt was encoded for
├── Draining                 the server is shutting down; try elsewhere
├── RequestFailed            an accepted request failed alone
│   └── DeadlineUnreachable  it was ended early, since its scheduling deadline could not be met
├── ServerFault              a fault of the server; its log has the details
├── CredentialsUnusable      what the client is to be known by cannot be used; nothing was sent
└── ChatTemplateFailed       the model's chat template does not take these messages
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import grpc

from splitserve_rpc.errors import CODE_OF_REASON, RpcFailure


class SplitserveError(Exception):
    """Base of all errors of this package. `reason` is one of the server's, or empty."""

    def __init__(self, message: str, reason: str = "", retry_delay_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.retry_delay_s = retry_delay_s


class ServerUnreachable(SplitserveError):
    """No connection, or it broke and did not come back in time."""


class DeadlineExceeded(SplitserveError):
    """The deadline given with the request has passed."""


class InvalidRequest(SplitserveError):
    """The request is refused as it stands."""


class CallerUnknown(SplitserveError):
    """No credential was given, or one that is not valid."""


class CallerNotAllowed(SplitserveError):
    """The credential is valid, and not for this."""


class RequestIdInUse(SplitserveError):
    """An unfinished request has this id."""


class RequestUnknown(SplitserveError):
    """No unfinished request has this id."""


class TokenizerUnavailable(SplitserveError):
    """The server offers no tokenizer, or none that can be read."""


class QueueFull(SplitserveError):
    """Too many requests wait."""


class QuotaExceeded(SplitserveError):
    """A limit of the caller's tenant."""


class StreamNotRead(SplitserveError):
    """The server ended a stream that was not read; what it had brought can be continued."""


class ModelNotReady(SplitserveError):
    """No executor has registered yet."""


class ModelChanged(SplitserveError):
    """Another model is served than the prompt was encoded for."""


class Draining(SplitserveError):
    """The server is shutting down. `schedulers`: addresses of others, if it names some."""

    schedulers: tuple[str, ...] = ()


class RequestFailed(SplitserveError):
    """An accepted request failed alone."""


class DeadlineUnreachable(RequestFailed):
    """The request could not meet its scheduling deadline any more, and was ended early."""


class ServerFault(SplitserveError):
    """A fault of the server."""


class CredentialsUnusable(SplitserveError):
    """What the client is to be known by cannot be used: its API key, or its TLS files."""


class ChatTemplateFailed(SplitserveError):
    """The model's chat template does not take these messages."""


_ERROR_OF_REASON: Mapping[str, type[SplitserveError]] = MappingProxyType(
    {
        "CALLER_UNKNOWN": CallerUnknown,
        "CALLER_NOT_ALLOWED": CallerNotAllowed,
        "REQUEST_ID_IN_USE": RequestIdInUse,
        "REQUEST_UNKNOWN": RequestUnknown,
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
        # Without a reason these are not the server's word: the call was cut on the way, and which
        # of them gRPC then reports depends on what it was about to do.
        grpc.StatusCode.CANCELLED: ServerUnreachable,
        grpc.StatusCode.INTERNAL: ServerUnreachable,
        grpc.StatusCode.UNKNOWN: ServerUnreachable,
        grpc.StatusCode.UNAUTHENTICATED: CallerUnknown,
        grpc.StatusCode.PERMISSION_DENIED: CallerNotAllowed,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
        # gRPC itself refuses a message that is much too large.
        grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,
    }
)


def error_of_reason(
    reason: str,
    message: str,
    retry_delay_s: float | None = None,
    schedulers: tuple[str, ...] = (),
) -> SplitserveError:
    """The error for what a server says in-band; an unknown reason gives RequestFailed."""
    error = _ERROR_OF_REASON.get(reason)
    if error is None:
        code = CODE_OF_REASON.get(reason)
        error = InvalidRequest if code is grpc.StatusCode.INVALID_ARGUMENT else RequestFailed
    return _naming(error(message, reason, retry_delay_s), schedulers)


def error_of_failure(failure: RpcFailure) -> SplitserveError:
    """The error for a failed call: by its reason; where there is none, by its code."""
    if not failure.reason:
        error = _ERROR_OF_CODE.get(failure.code, ServerFault)
        message = f"{failure.code.name}: {failure.message or 'the server says no more'}"
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
