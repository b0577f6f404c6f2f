"""Request bodies: bounded reading, validation against schemas, and a budget of bytes.

Large bodies are validated in a thread, off the event loop.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from splitserve_gateway.http.errors import ApiError, invalid, quoted
from splitserve_gateway.sharing import Shares

Schema = TypeVar("Schema", bound=BaseModel)

# Key in the state of a scope whose caller needs no credential.
NEEDS_CONTENT_TYPE = "needs_content_type"
_JSON = "application/json"
_KIND = "invalid_request_error"
# Parsing 16 KiB takes a few milliseconds at most, and a fraction of one for texts.
_SMALL_BYTES = 16 * 1024
# Bounds on objects and lists, keys, and other values. No request, and no prompt that fits a model,
# has as many. Parsing that many takes 0.1 s, in which no other request is served.
_MOST = (
    ((b"{", b"["), 65_536, "objects and lists"),
    ((b'":', b'" :'), 65_536, "keys"),
    ((b",",), 1_200_000, "values"),
)
# Creating errors takes time for each error.
_MAX_ERRORS = 100
_MAX_LENGTH_DIGITS = 20
# Time for the body to arrive, from the end of the headers.
BODY_TIMEOUT_S = 60.0


async def read_body(
    request: Request,
    schema: type[Schema],
    max_bytes: int,
    share: BodyShare,
    context: dict[str, object] | None = None,
) -> Schema:
    """Reads the body and validates it against `schema`, in the validation context `context`.

    Raises ApiError: 400 for an invalid body, 408 if it is late, 413 beyond `max_bytes`, 415 for a
    type other than JSON, 429 if there is no room for its `share` of all bodies.
    """
    _check_head(request, max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read(request, max_bytes, share)
    except TimeoutError as error:
        raise late() from error
    if len(body) <= _SMALL_BYTES:
        return _parse(body, schema, context)
    return await asyncio.to_thread(_parse, body, schema, context)


def _parse(body: bytearray, schema: type[Schema], context: dict[str, object] | None) -> Schema:
    """Parses a body. Raises ApiError.

    Bodies whose parsing would hold Python's lock for long are refused before parsing.
    """
    for marks, most, what in _MOST:
        if sum(map(body.count, marks)) > most:
            message = f"the body has more than {most} {what}, also counted within texts"
            raise invalid(message, code="too_many_values")
    try:
        return schema.model_validate_json(body, context=context)
    except ValidationError as error:
        raise refusal_of(error) from error


def _check_head(request: Request, max_bytes: int) -> None:
    headers = request.headers
    named = ", ".join(headers.getlist("content-type"))
    media_type = named.partition(";")[0].strip().lower()
    # Required without a credential: a web page can send a body without a type to any origin.
    is_required = request.scope.get("state", {}).get(NEEDS_CONTENT_TYPE, False)
    if media_type != _JSON and (named or is_required):
        is_named = f"is {quoted(named)!r}" if named else "is missing"
        raise unsupported(f"the header content-type {is_named}; allowed: {_JSON}")
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise unsupported(f"the header content-encoding is {quoted(encoding)!r}; allowed: none")
    check_length(request, max_bytes)


def check_length(request: Request, max_bytes: int) -> None:
    """Raises ApiError if the announced length of the body is beyond `max_bytes`."""
    declared = request.headers.get("content-length", "0")
    digits = declared.lstrip("0") or "0"
    # Python refuses to parse numbers with thousands of digits.
    if digits.isdecimal() and (len(digits) > _MAX_LENGTH_DIGITS or int(digits) > max_bytes):
        raise too_large(max_bytes)


def unsupported(message: str) -> ApiError:
    """Returns a 415 error: the body has a type that is not read."""
    return ApiError(415, _KIND, message, code="unsupported_media_type")


def late() -> ApiError:
    """Returns a 408 error."""
    message = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} seconds"
    return ApiError(408, _KIND, message, code="request_timeout")


async def _read(request: Request, max_bytes: int, share: BodyShare) -> bytearray:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large(max_bytes)
        await share.grow(len(body))
    return body


def too_large(max_bytes: int) -> ApiError:
    """Returns a 413 error."""
    message = f"the body is larger than {max_bytes} bytes"
    return ApiError(413, _KIND, message, code="request_too_large")


def refusal_of(error: ValidationError) -> ApiError:
    """Returns the 400 error of the first validation error, with the field's name."""
    if error.error_count() > _MAX_ERRORS:
        message = f"more than {_MAX_ERRORS} fields are invalid or unknown"
        return invalid(message, code="invalid_value")
    first = error.errors(include_url=False, include_context=False)[0]
    # Tags of unions, and the mark of a key, are not field names.
    parts = [str(part) for part in first["loc"] if not str(part).startswith(("<", "["))]
    param = quoted(".".join(parts)) if parts else None
    if first["type"] == "json_invalid":
        return invalid(f"the body is not JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "unknown_field":
        return invalid(f"unknown field {param!r}", param, "unknown_field")
    if first["type"] == "missing":
        return invalid(f"{param} is required", param, "missing_field")
    if first["type"] == "unsupported_field":
        return invalid(f"{param} {first['msg']}", param, "unsupported_field")
    if first["type"] == "content_missing":
        is_null = "content" in first["input"]
        was = "null" if is_null else "absent"
        message = f"{param}.content {first['msg']}, but is {was}"
        return invalid(message, f"{param}.content" if is_null else param, "invalid_value")
    name, wanted = param or "the body", first["msg"]
    if first["type"] == "string_type" and first["loc"][-1:] == ("<text>",):
        # Values that are not lists are validated as texts.
        wanted = "Input should be a valid string or a list"
    return invalid(f"{name}: {wanted}, got {_shown(first['input'])}", param, "invalid_value")


def _shown(value: object) -> str:
    """Returns a short form of `value`, which may be very long."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a larger number"
    text = repr(value[:80]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


# -- Budget of body bytes of all requests ----------------------------------------------------------

# The first bytes of each body are not counted, so small bodies pass whatever large ones hold.
FREE_BYTES = 64 * 1024
_PATIENCE_S = 5.0
_RETRY_AFTER_S = 2.0


class BodyBudget:
    """Budget of bytes of bodies that are being read, or not yet encoded as token ids.

    Where callers are known, each tenant leaves a share to others.
    """

    def __init__(self, max_bytes: int, patience_s: float = _PATIENCE_S) -> None:
        self._shares = Shares(max_bytes)
        self._patience_s = patience_s
        self._has_more = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Number of bytes that all bodies hold now."""
        return self._shares.num_held

    def share(self, tenant: str | None) -> BodyShare:
        """Returns the share of one body, for use in a `with`. `tenant`: None if unknown."""
        return BodyShare(self, tenant)

    async def take(self, tenant: str | None, num_bytes: int) -> None:
        """Takes `num_bytes`; waits a while for room. Raises ApiError: 429."""
        try:
            async with asyncio.timeout(self._patience_s):
                while not self._shares.may_take(tenant, num_bytes):
                    self._has_more.clear()
                    await self._has_more.wait()
        except TimeoutError as error:
            message = f"request bodies take too many of the {self._shares.num_all} bytes allowed"
            code = "too_many_body_bytes"
            raise ApiError(
                429, "rate_limit_error", message, code=code, retry_after_s=_RETRY_AFTER_S
            ) from error
        self._shares.take(tenant, num_bytes)

    def give_back(self, tenant: str | None, num_bytes: int) -> None:
        """Returns `num_bytes` to the budget, and wakes waiting bodies."""
        self._shares.give_back(tenant, num_bytes)
        self._has_more.set()


class BodyShare:
    """Bytes that one body holds of the budget; returned at the end of the `with`."""

    def __init__(self, budget: BodyBudget, tenant: str | None) -> None:
        self._budget = budget
        self._tenant = tenant
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._num_bytes:
            self._budget.give_back(self._tenant, self._num_bytes)

    async def grow(self, num_body_bytes: int) -> None:
        """Counts a body that now has `num_body_bytes`; waits a while for room.

        Raises ApiError: 429.
        """
        num_more = num_body_bytes - FREE_BYTES - self._num_bytes
        if num_more > 0:
            await self._budget.take(self._tenant, num_more)
            self._num_bytes += num_more
