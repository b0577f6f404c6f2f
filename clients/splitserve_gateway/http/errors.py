"""Errors in OpenAI's and Anthropic's formats, and the HTTP error of each client library error.

OpenAI: {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
Anthropic: {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Sequence
from http import HTTPStatus

from pydantic_core import to_json
from starlette.responses import Response

from splitserve_client import (
    CallerNotAllowed,
    CallerUnknown,
    ChatTemplateFailed,
    DeadlineExceeded,
    DeadlineUnreachable,
    Draining,
    InvalidRequest,
    ModelChanged,
    ModelNotReady,
    OutputUnknown,
    QueueFull,
    QuotaExceeded,
    RequestFailed,
    ServerUnreachable,
    SplitserveError,
    StreamNotRead,
    TokenizerUnavailable,
)
from splitserve_common import WebRefusal

# Reason of a ServerUnreachable: a scheduler refuses the gateway itself, not its caller.
UPSTREAM_REFUSED = "UPSTREAM_REFUSED"

_RETRY_AFTER_S = 1.0
# Codes that clients know by another name than the scheduler's reason.
_CODES = {
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "GRAMMAR_INVALID": "invalid_grammar",
    "QUOTA_EXCEEDED": "rate_limit_exceeded",
}
_MESSAGES = "/v1/messages"
# Anthropic's type by status; of other statuses: invalid_request_error.
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MAX_QUOTED_CHARS = 120
# Names of models and adapters in an error.
_MAX_LISTED = 10

_log = logging.getLogger(__name__)


class ErrorFormat(enum.Enum):
    """Format of an error's body: OpenAI's, or Anthropic's under `/v1/messages`."""

    OPENAI = enum.auto()
    ANTHROPIC = enum.auto()

    @classmethod
    def of(cls, path: str) -> ErrorFormat:
        """Returns the format of errors at `path`."""
        is_messages = path == _MESSAGES or path.startswith(f"{_MESSAGES}/")
        return cls.ANTHROPIC if is_messages else cls.OPENAI


class ApiError(Exception):
    """Error sent to a caller.

    `kind`: OpenAI's `type`; `code`: for programs; `param`: field at fault.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(
        self, form: ErrorFormat = ErrorFormat.OPENAI, request_id: str = ""
    ) -> dict[str, object]:
        """Returns the JSON object of the error in the format `form`.

        `request_id`: id of the exchange, which Anthropic's format repeats.
        """
        message = self.message
        if self.code == "context_length_exceeded":
            # Agents shorten their chat if a message begins with these words; LangChain raises
            # ContextOverflowError.
            message = f"prompt is too long: {message}"
        if form is ErrorFormat.ANTHROPIC:
            return self._anthropic_body(message, request_id)
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def _anthropic_body(self, message: str, request_id: str) -> dict[str, object]:
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error")
        details = {"error_code": self.code, "param": self.param}
        error = {"type": kind, "message": message, "details": details}
        return {"type": "error", "error": error, "request_id": request_id}

    def response(self, form: ErrorFormat = ErrorFormat.OPENAI, request_id: str = "") -> Response:
        """Returns the HTTP response with the error's status, headers and body; see `body`."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return Response(
            to_json(self.body(form, request_id)), self.status, headers, "application/json"
        )


def quoted(text: str) -> str:
    """Returns the part of a caller's text that errors may repeat, at most 120 characters."""
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Returns a 400 error: the request cannot be served as it stands."""
    return ApiError(400, "invalid_request_error", message, code=code, param=param)


def model_unknown(model: str, known: Sequence[str]) -> ApiError:
    """Returns a 404 error: no scheduler serves `model`. `known`: models and adapters."""
    available = ", ".join(map(repr, known[:_MAX_LISTED]))
    if len(known) > _MAX_LISTED:
        available += f" and {len(known) - _MAX_LISTED} more"
    message = f"the model {quoted(model)!r} is not served; available: {available}"
    return ApiError(404, "invalid_request_error", message, code="model_not_found", param="model")


def caller_unknown(message: str) -> ApiError:
    """Returns a 401 error: no valid credential was given."""
    return ApiError(401, "invalid_request_error", message, code="invalid_api_key")


def caller_not_allowed(message: str) -> ApiError:
    """Returns a 403 error: the credential is valid, but does not allow this request."""
    return ApiError(403, "permission_error", message, code="caller_not_allowed")


def web_refused(refusal: WebRefusal) -> ApiError:
    """Returns the error of a refused request of a web page."""
    kind = "permission_error" if refusal.status == HTTPStatus.FORBIDDEN else "invalid_request_error"
    return ApiError(refusal.status, kind, refusal.message, code=refusal.code)


def too_many_requests(message: str) -> ApiError:
    """Returns a 429 error: the gateway has no place for another request now."""
    kind, code = "rate_limit_error", "too_many_requests"
    return ApiError(429, kind, message, code=code, retry_after_s=_RETRY_AFTER_S)


def too_many_lookups() -> ApiError:
    """Returns a 503 error: too many unknown credentials are being checked."""
    message = "too many unknown credentials are being checked; try again"
    return _unavailable(message, "too_many_callers")


def no_scheduler() -> ApiError:
    """Returns a 503 error: no scheduler is reachable, or none has an executor yet."""
    return _unavailable("no scheduler is ready; try again", "model_not_ready")


def upstream_refused() -> ApiError:
    """Returns a 503 error: schedulers refuse the gateway's own key."""
    message = "schedulers reject the gateway's own key; the operator has to fix this"
    return _unavailable(message, "upstream_refused")


def draining() -> ApiError:
    """Returns a 503 error: the gateway is being stopped."""
    return _unavailable("the gateway is shutting down; try again", "draining")


def _unavailable(message: str, code: str) -> ApiError:
    kind = "service_unavailable_error"
    return ApiError(503, kind, message, code=code, retry_after_s=_RETRY_AFTER_S)


def error_of(error: Exception) -> ApiError:
    """Returns the HTTP error of any exception. Logs an unforeseen exception and hides its text."""
    match error:
        case ApiError():
            return error
        case CallerUnknown():
            return caller_unknown(error.message)
        case CallerNotAllowed():
            return caller_not_allowed(error.message)
        case OutputUnknown():
            return _output_gone(error)
        case SplitserveError():
            return api_error(error)
    _log.error("request_failed", exc_info=error)
    message = "the gateway failed; its log has the details"
    return ApiError(500, "server_error", message, code="internal")


def api_error(error: SplitserveError) -> ApiError:
    """Returns the HTTP error of a client library error."""
    code = _CODES.get(error.reason, error.reason.lower()) or None
    retry_after_s = error.retry_delay_s
    match error:
        case InvalidRequest():
            return invalid(error.message, code=code or "invalid_value")
        case ChatTemplateFailed():
            return invalid(error.message, "messages", "chat_template_failed")
        case TokenizerUnavailable():
            return invalid(error.message, code="tokenizer_unavailable")
        case QueueFull() | QuotaExceeded():
            kind = "rate_limit_error"
            retry_after_s = retry_after_s or _RETRY_AFTER_S
            return ApiError(429, kind, error.message, code=code, retry_after_s=retry_after_s)
        case DeadlineExceeded() | DeadlineUnreachable():
            return ApiError(504, "timeout_error", error.message, code=code or "deadline_exceeded")
        case ServerUnreachable():
            return _unreachable(error)
        case ModelNotReady() | Draining() | StreamNotRead():
            kind = "service_unavailable_error"
            retry_after_s = retry_after_s or _RETRY_AFTER_S
            return ApiError(503, kind, error.message, code=code, retry_after_s=retry_after_s)
        case ModelChanged():
            return _unavailable(error.message, "model_changed")
        case RequestFailed():
            return _failed(error, code)
        case _:
            _log.error("request_failed", exc_info=error)
            message = "the service failed; its log has the details"
            return ApiError(500, "server_error", message, code=code or "internal")


def _failed(error: RequestFailed, code: str | None) -> ApiError:
    if error.reason == "EXECUTOR_LOST_REPEATEDLY":
        # Not 500: OpenAI's clients retry that, and a retry may cost more executors.
        return ApiError(422, "invalid_request_error", error.message, code=code)
    return ApiError(500, "server_error", error.message, code=code)


def _output_gone(error: OutputUnknown) -> ApiError:
    message = "the stream of Last-Event-ID can no longer be resumed; send the request without it"
    return ApiError(410, "invalid_request_error", message, code=error.reason.lower())


def _unreachable(error: ServerUnreachable) -> ApiError:
    if error.reason == UPSTREAM_REFUSED:
        return upstream_refused()
    # Does not reveal the addresses of schedulers.
    message = "the scheduler of this request cannot be reached; try again"
    return _unavailable(message, "server_unreachable")
