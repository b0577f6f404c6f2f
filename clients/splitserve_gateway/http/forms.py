"""Request bodies that are forms with a file (multipart/form-data), parsed as they arrive."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from splitserve_gateway.http.bodies import (
    BODY_TIMEOUT_S,
    BodyShare,
    check_length,
    late,
    too_large,
    unsupported,
)
from splitserve_gateway.http.errors import ApiError, invalid, quoted

_FORM = "multipart/form-data"
_MAX_PARTS = 64
_MAX_FIELD_BYTES = 64 * 1024
_MAX_PART_HEADER_BYTES = 8 * 1024


@dataclass(slots=True)
class Form:
    """Parts of a form: `fields` by name, each with all its values, and files by name."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytearray] = field(default_factory=dict)


async def read_form(request: Request, max_bytes: int, share: BodyShare) -> Form:
    """Reads a body of the type multipart/form-data.

    Raises ApiError: 400 for a malformed form, 408 if it is late, 413 beyond `max_bytes`, 415 for
    another type, 429 if there is no room for its `share` of all bodies.
    """
    named = request.headers.get("content-type", "")
    media_type, options = parse_options_header(named)
    if media_type != _FORM.encode() or not options.get(b"boundary"):
        raise unsupported(
            f"the header content-type is {quoted(named)!r}; allowed: {_FORM} with a boundary"
        )
    check_length(request, max_bytes)
    parts = _FormParts(options[b"boundary"])
    num_bytes = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise too_large(max_bytes)
                await share.grow(num_bytes)
                parts.feed(chunk)
    except TimeoutError as error:
        raise late() from error
    return parts.form()


class _FormParts:
    """Parts of a form, as the parser of its body finds them."""

    def __init__(self, boundary: bytes) -> None:
        self._form = Form()
        self._header, self._value = b"", b""
        self._name, self._is_file = "", False
        self._data = bytearray()
        self._num_parts = 0
        self._is_complete = False
        callbacks: dict[str, Any] = {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_part_data": self._on_data,
            "on_part_end": self._end,
            "on_end": self._complete,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        except FormParserError as error:
            raise _malformed(error) from error

    def feed(self, chunk: bytes) -> None:
        """Parses the next bytes of the body. Raises ApiError."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _malformed(error) from error

    def form(self) -> Form:
        """Returns the form. Raises ApiError if the body is incomplete."""
        if not self._is_complete:
            raise invalid("the form ends without its last boundary", code="invalid_form")
        return self._form

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise invalid(f"the form has more than {_MAX_PARTS} parts", code="too_many_values")
        self._name, self._is_file, self._data = "", False, bytearray()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        if len(self._value) > _MAX_PART_HEADER_BYTES:
            raise invalid(
                f"a part of the form has a header of more than {_MAX_PART_HEADER_BYTES} bytes",
                code="invalid_form",
            )

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode(errors="replace")
            self._is_file = b"filename" in options
        self._header = self._value = b""

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]
        if not self._is_file and len(self._data) > _MAX_FIELD_BYTES:
            message = f"{quoted(self._name)} has more than {_MAX_FIELD_BYTES} bytes"
            raise invalid(message, quoted(self._name))

    def _end(self) -> None:
        name = self._name
        if not name:
            raise invalid("a part of the form has no name", code="invalid_form")
        if self._is_file:
            if name in self._form.files:
                raise invalid(f"{quoted(name)} is given twice; allowed: once", quoted(name))
            self._form.files[name] = self._data
            return
        try:
            value = self._data.decode()
        except UnicodeDecodeError as error:
            raise invalid(f"{quoted(name)} is not UTF-8", quoted(name)) from error
        self._form.fields.setdefault(name, []).append(value)

    def _complete(self) -> None:
        self._is_complete = True


def _malformed(error: Exception) -> ApiError:
    return invalid(f"the body is no form: {quoted(str(error))}", code="invalid_form")
