"""Request bodies: read up to a bound, checked against their schema off the event loop if large."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from splitserve_gateway.http.errors import ApiError, invalid

Schema = TypeVar("Schema", bound=BaseModel)

# Parsing takes about a millisecond for so many bytes.
_SMALL_BYTES = 128 * 1024


async def read_body(request: Request, schema: type[Schema], max_bytes: int) -> Schema:
    """The body as `schema` has it. Raises ApiError: 413 beyond `max_bytes`, 400 if it is wrong."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    try:
        if len(body) <= _SMALL_BYTES:
            return schema.model_validate_json(body)
        return await asyncio.to_thread(schema.model_validate_json, body)
    except ValidationError as error:
        raise _refusal(error) from error


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes"
    return ApiError(413, "invalid_request_error", message, code="request_too_large")


def _refusal(error: ValidationError) -> ApiError:
    """The first thing that is wrong, with the field's name."""
    first = error.errors(include_url=False, include_context=False)[0]
    # Which kind of a union it was, and that it was a key, are no fields.
    param = ".".join(str(part) for part in first["loc"] if str(part)[:1] not in "<[") or None
    if first["type"] == "json_invalid":
        return invalid(f"the body is no JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return invalid(f"unknown field {param}", param, "unknown_field")
    if first["type"] == "missing":
        return invalid(f"{param} is required", param, "missing_field")
    if first["type"] == "unsupported_field":
        return invalid(f"{param} {first['msg']}", param, "unsupported_field")
    name = param or "the body"
    return invalid(f"{name}: {first['msg']}, got {_shown(first['input'])}", param, "invalid_value")


def _shown(value: object) -> str:
    """A short form of what may be very long."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a larger number"
    text = repr(value[:80]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
