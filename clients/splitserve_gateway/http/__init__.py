"""HTTP server parts: connections, bounded bodies, errors in clients' formats, event streams."""

from splitserve_gateway.http.bodies import (
    FREE_BYTES,
    BodyBudget,
    BodyShare,
    read_body,
    refusal_of,
)
from splitserve_gateway.http.connection import Connection
from splitserve_gateway.http.errors import (
    UPSTREAM_REFUSED,
    ApiError,
    ErrorFormat,
    api_error,
    caller_not_allowed,
    caller_unknown,
    error_of,
    invalid,
    model_unknown,
    no_scheduler,
    quoted,
    too_many_lookups,
    too_many_requests,
    upstream_refused,
)
from splitserve_gateway.http.exchange import (
    MESSAGE_EVENTS,
    NAMED_EVENTS,
    EndedExchange,
    Exchange,
    IdentifiedEvent,
    event_stream,
)
from splitserve_gateway.http.forms import Form, read_form
from splitserve_gateway.http.guard import Exchanges, Guard, is_about_health, is_for_operators
from splitserve_gateway.http.listener import Listener, connection_places, origin_of

__all__ = [
    "FREE_BYTES",
    "MESSAGE_EVENTS",
    "NAMED_EVENTS",
    "UPSTREAM_REFUSED",
    "ApiError",
    "BodyBudget",
    "BodyShare",
    "Connection",
    "EndedExchange",
    "ErrorFormat",
    "Exchange",
    "Exchanges",
    "Form",
    "Guard",
    "IdentifiedEvent",
    "Listener",
    "api_error",
    "caller_not_allowed",
    "caller_unknown",
    "connection_places",
    "error_of",
    "event_stream",
    "invalid",
    "is_about_health",
    "is_for_operators",
    "model_unknown",
    "no_scheduler",
    "origin_of",
    "quoted",
    "read_body",
    "read_form",
    "refusal_of",
    "too_many_lookups",
    "too_many_requests",
    "upstream_refused",
]
