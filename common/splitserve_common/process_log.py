"""Logging setup of a process: to standard error, as text lines or as JSON."""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

from splitserve_common.text import printable

_log = logging.getLogger(__name__)
_TEXT, JSON = "text", "json"
LOG_FORMATS = (_TEXT, JSON)


def start_logging(level: str, log_format: str = _TEXT) -> StandardError | None:
    """Starts logging to standard error: splitserve at `level`, libraries from WARNING on.

    With `json` as `log_format`, other writes to standard error become log lines, too. Child
    processes with a log of their own must write to `file` of the returned object.
    """
    errors = StandardError() if log_format == JSON else None
    handler = logging.StreamHandler() if errors is None else logging.StreamHandler(errors.file)
    handler.setFormatter(LineFormatter() if errors is None else JsonFormatter())
    logging.basicConfig(level=max(logging.WARNING, _number(level)), handlers=[handler])
    for package in LOGGING_PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
    if errors is not None:
        # Otherwise a Python warning would be two lines, and a traceback many.
        logging.captureWarnings(True)
        sys.excepthook = _uncaught
        sys.unraisablehook = _unraisable
        threading.excepthook = lambda args: _uncaught(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )
        errors.start()
    return errors


def say_why_not(program: str, why: object) -> None:
    """Reports why `splitserve PROGRAM` does not start: as text, or as an event in a JSON log."""
    formatters = (handler.formatter for handler in logging.getLogger().handlers)
    if any(isinstance(formatter, JsonFormatter) for formatter in formatters):
        _log.critical("start_failed program=%s why=%r", program, str(why))
    else:
        sys.stderr.write(f"splitserve {program}: {why}\n")


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


def _uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    _log.critical("uncaught_exception", exc_info=(kind, error, traceback))


def _unraisable(args: sys.UnraisableHookArgs) -> None:
    """Logs an exception of a finalizer. May run after standard error has left the log."""
    error = args.exc_value or args.exc_type()
    where = args.err_msg or f"in {type(args.object).__qualname__}"
    _log.error(
        "ignored_exception where=%r", where, exc_info=(args.exc_type, error, args.exc_traceback)
    )


# -- JSON log format: one object per line for each event (`--log-format json`) ---------------------
#
# An event is the format of a log call: `executor_lost address=%s reason=%r`. Its name and fields
# are read from that format and its arguments, never from the finished text. So a peer cannot inject
# a field through its name.

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
    time = datetime.fromtimestamp(seconds, UTC)
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


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


# -- Text log format: one line per event, whatever text clients and peers supply -------------------

# Packages whose events are logged at the configured level. Libraries are logged from WARNING on,
# since their details of a connection may contain its payload.
LOGGING_PACKAGES = (
    "executor_service",
    "scheduler_service",
    "splitserve_adapters",
    "splitserve_bench",
    "splitserve_cli",
    "splitserve_client",
    "splitserve_common",
    "splitserve_contract",
    "splitserve_gateway",
    "splitserve_grammars",
    "splitserve_kernels",
    "splitserve_keys",
    "splitserve_live",
    "splitserve_metrics",
    "splitserve_options",
    "splitserve_rpc",
    "splitserve_text",
    "splitserve_tracing",
)
# Prefix of lines that are not an event: those of a traceback.
CONTINUED = "  | "
MAX_LINE_CHARS = 4000
# Limits of a traceback and of each of its lines. The message of an error may quote its input.
MAX_TRACEBACK_LINES = 400
MAX_TRACEBACK_CHARS = 300


class LineFormatter(logging.Formatter):
    """Formats each event as one printable line of bounded length; traceback lines have a prefix.

    So no input can forge an event, hide one, or control a terminal.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        context = "".join(f" {name}={_shown(value)}" for name, value in context_fields().items())
        event = _line(self.formatMessage(record) + context, MAX_LINE_CHARS)
        return "\n".join([event, *(CONTINUED + line for line in traceback_lines(record))])


def traceback_lines(record: logging.LogRecord) -> list[str]:
    """Returns the traceback of `record` as bounded, printable lines; empty if there is no error."""
    text = record.stack_info or ""
    if record.exc_info and record.exc_info[1] is not None:
        text += "".join(traceback.format_exception(record.exc_info[1]))
    lines = text.splitlines()
    if len(lines) > MAX_TRACEBACK_LINES:
        # The last lines name the error.
        lines = ["...", *lines[-MAX_TRACEBACK_LINES:]]
    return [_line(line, MAX_TRACEBACK_CHARS) for line in lines]


def _shown(value: str) -> str:
    return value if value.isidentifier() or value.isalnum() else repr(value)


def _line(text: str, most_chars: int) -> str:
    return printable(text if len(text) <= most_chars else f"{text[:most_chars]}...")


# -- Context of log lines: the request and the trace on behalf of which code runs ------------------


@dataclass(frozen=True, slots=True)
class LogContext:
    """Request of a log line. `request_id`: the caller's id. `trace_id`: 32 hex digits, or empty."""

    request_id: str
    trace_id: str = ""

    def fields(self) -> dict[str, str]:
        """Returns the non-empty fields by name."""
        named = {"request_id": self.request_id, "trace_id": self.trace_id}
        return {name: value for name, value in named.items() if value}


# Set per task: child tasks inherit the context, sibling tasks do not.
log_context: ContextVar[LogContext | None] = ContextVar("log_context", default=None)


@contextmanager
def logging_about(context: LogContext) -> Iterator[None]:
    """Context manager: all log lines within, from any package, belong to this request."""
    token = log_context.set(context)
    try:
        yield
    finally:
        log_context.reset(token)


def context_fields() -> dict[str, str]:
    """Returns the log fields of the calling code's request; empty if there is none."""
    context = log_context.get()
    return {} if context is None else context.fields()


# -- Redirection of standard error into the log, for JSON logs -------------------------------------
#
# C++ libraries (gRPC core, Torch) write to standard error themselves, as do messages about a failed
# start. In a JSON log, these have to be JSON, too.

_STDERR = 2
_MAX_LINE_BYTES = 16_384
# End marker: all earlier output has been read when this line is read.
_LAST = b"\0the last line\n"
_LAST_LINES_S = 2.0

_stderr_log = logging.getLogger("stderr")


class StandardError:
    """Replaces file descriptor 2 by a pipe into the log until `close`. `file`: the original.

    A crash also ends the reader, so Python's fault handler writes its text to the original.
    """

    def __init__(self) -> None:
        self.file: TextIO = os.fdopen(os.dup(_STDERR), "w", encoding="utf-8", buffering=1)
        reading, writing = os.pipe()
        os.dup2(writing, _STDERR)
        os.close(writing)
        self._reader = threading.Thread(target=_log_lines, args=(reading,), daemon=True)

    def start(self) -> None:
        """Starts the reader. Must be called after the log writes to `file`."""
        faulthandler.enable(self.file)
        self._reader.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Logs all output so far and restores file descriptor 2. Later output is not logged."""
        atexit.unregister(self.close)
        sys.stderr.flush()
        os.write(_STDERR, b"\n" + _LAST)
        self._reader.join(_LAST_LINES_S)
        os.dup2(self.file.fileno(), _STDERR)


def _log_lines(reading: int) -> None:
    with open(reading, "rb") as lines:
        while (line := lines.readline(_MAX_LINE_BYTES)) and line != _LAST:
            if text := line.decode("utf-8", "backslashreplace").rstrip():
                _stderr_log.warning("%s", text)
