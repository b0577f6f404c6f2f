"""Request bodies: read up to a bound, checked against their schema off the event loop if large."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from splitserve_gateway.http.errors import ApiError, invalid

Schema = TypeVar("Schema", bound=BaseModel)

_JSON = "application/json"
_KIND = "invalid_request_error"
# Parsing takes about a millisecond for so many bytes.
_SMALL_BYTES = 128 * 1024
# Parsing goes on without a pause, for some 50 ms if there are so many.
_MAX_VALUES = 1_000_000
# From the end of the headers on.
_BODY_TIMEOUT_S = 60.0


async def read_body(request: Request, schema: type[Schema], max_bytes: int) -> Schema:
    """The body as `schema` has it.

    Raises ApiError: 400 if it is wrong, 408 if it does not come, 413 beyond `max_bytes`, 415 if it
    is something else than JSON.
    """
    _check_head(request, max_bytes)
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            body = await _read(request, max_bytes)
    except TimeoutError as error:
        message = f"the body did not come within {_BODY_TIMEOUT_S:.0f} seconds"
        raise ApiError(408, _KIND, message, code="request_timeout") from error
    try:
        if len(body) <= _SMALL_BYTES:
            return schema.model_validate_json(body)
        return await asyncio.to_thread(schema.model_validate_json, body)
    except ValidationError as error:
        raise _refusal(error) from error


def _check_head(request: Request, max_bytes: int) -> None:
    headers = request.headers
    media_type = headers.get("content-type", _JSON).partition(";")[0].strip().lower()
    if media_type != _JSON:
        message = f"the body must be {_JSON}; content-type says {media_type[:80]!r}"
        raise ApiError(415, _KIND, message, code="unsupported_media_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        message = "the body must not be compressed"
        raise ApiError(415, _KIND, message, code="unsupported_media_type")
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)


async def _read(request: Request, max_bytes: int) -> bytearray:
    body = bytearray()
    num_values = 0
    async for chunk in request.stream():
        body += chunk
        # Each value but the first of a list or an object follows a comma.
        num_values += chunk.count(b",") + chunk.count(b"[") + chunk.count(b"{")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if num_values > _MAX_VALUES:
            message = f"the body has more than {_MAX_VALUES} values"
            raise ApiError(413, _KIND, message, code="request_too_large")
    return body


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes"
    return ApiError(413, _KIND, message, code="request_too_large")


def _refusal(error: ValidationError) -> ApiError:
    """The first thing that is wrong, with the field's name."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "json_invalid":
        return invalid(f"the body is no JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return invalid(f"unknown field {param}", param, "unknown_field")
    if first["type"] == "missing":
        return invalid(f"{param} is required", param, "missing_field")
    value = repr(first["input"])
    shown = value if len(value) <= 80 else f"{value[:80]}..."
    return invalid(f"{param}: {first['msg']}, got {shown}", param, "invalid_value")
