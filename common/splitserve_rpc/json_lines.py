"""JSON log format: one object per line for each event (`--log-format json`).

An event is the format of a log call: `executor_lost address=%s reason=%r`. Its name and fields are
read from that format and its arguments, never from the finished text. So a peer cannot inject a
field through its name.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime

from splitserve_rpc.log_context import context_fields
from splitserve_rpc.log_lines import LOGGING_PACKAGES, MAX_LINE_CHARS, traceback_lines

MAX_FIELD_CHARS = 2000
_CONVERSION = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-z])")
_EVENT = re.compile(r"[a-z][a-z0-9_]*\Z")
# Punctuation after a field is no part of the field: `a=%s: because`.
_END = ":;,"
# Conversions whose digits are not decimal, such as 0644.
_NOT_DECIMAL = ("o", "x")


class JsonFormatter(logging.Formatter):
    """Formats log records as objects with `time` (UTC, RFC 3339), `level`, `logger`, `message`.

    Events of splitserve also have `event` and `fields`. `request_id` and `trace_id` are added if
    known, `error` with a traceback if there is an error. The line is ASCII and bounded.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = _bounded(record.getMessage(), MAX_LINE_CHARS)
        line: dict[str, object] = {
            "time": _rfc3339(record.created),
            "level": record.levelname,
            "logger": record.name,
        }
        event, fields = _event_of(record)
        if event:
            line["event"] = event
        line["message"] = message
        if fields:
            line["fields"] = fields
        line |= {name: _bounded(value, MAX_FIELD_CHARS) for name, value in context_fields().items()}
        if (error := _error_of(record)) is not None:
            line["error"] = error
        return json.dumps(line, allow_nan=False)


def _rfc3339(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _event_of(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """Returns the name and the fields of a splitserve event; both empty for a library's record.

    A record whose text must not be parsed has both as attributes (`extra`).
    """
    if isinstance(fields := getattr(record, "fields", None), dict):
        return str(getattr(record, "event", "")), {k: _plain(v) for k, v in fields.items()}
    if record.name.partition(".")[0] not in LOGGING_PACKAGES or not isinstance(record.msg, str):
        return "", {}
    arguments = iter(record.args if isinstance(record.args, tuple) else (record.args,))
    name, fields = "", {}
    for number, word in enumerate(record.msg.split(" ")):
        field, sign, value = word.rstrip(_END).partition("=")
        if number == 0:
            name = _filled(word.rstrip(_END), arguments)
        elif sign and _EVENT.match(field):
            fields[field] = _value(value, arguments)
        else:
            _filled(word, arguments)  # consumes its arguments; the text is in the message
    return (name, fields) if _EVENT.match(name) else ("", {})


def _value(template: str, arguments: Iterator[object]) -> object:
    """Returns the value of a field: its single argument, or else the formatted text."""
    conversion = _CONVERSION.fullmatch(template)
    if conversion is None or template == "%%" or template.endswith(_NOT_DECIMAL):
        return _bounded(_filled(template, arguments), MAX_FIELD_CHARS)
    return _plain(next(arguments))


def _plain(value: object) -> object:
    """Returns `value` as a JSON scalar: bool, int, None, finite float or bounded text."""
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return _bounded(str(value), MAX_FIELD_CHARS)


def _filled(template: str, arguments: Iterator[object]) -> str:
    """Returns `template` formatted with as many `arguments` as it takes."""
    conversions = [found for found in _CONVERSION.findall(template) if found != "%%"]
    return template % tuple(next(arguments) for _ in conversions)


def _error_of(record: logging.LogRecord) -> dict[str, object] | None:
    lines = traceback_lines(record)
    if not lines:
        return None
    error = record.exc_info[1] if record.exc_info else None
    named = {} if error is None else {"type": type(error).__qualname__}
    return {**named, "traceback": list(map(_encodable, lines))}


def _bounded(text: str, most_chars: int) -> str:
    return _encodable(text if len(text) <= most_chars else f"{text[:most_chars]}...")


def _encodable(text: str) -> str:
    """Returns `text` with lone surrogates escaped, which many JSON readers refuse."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
