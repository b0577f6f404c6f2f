"""Logging setup of a process: to standard error, as text lines or as JSON."""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType

from splitserve_rpc.json_lines import JsonFormatter
from splitserve_rpc.log_lines import LOGGING_PACKAGES, LineFormatter
from splitserve_rpc.standard_error import StandardError

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


def _unraisable(told: sys.UnraisableHookArgs) -> None:
    """Logs an exception of a finalizer. May run after standard error has left the log."""
    error = told.exc_value or told.exc_type()
    where = told.err_msg or f"in {type(told.object).__qualname__}"
    _log.error(
        "ignored_exception where=%r", where, exc_info=(told.exc_type, error, told.exc_traceback)
    )
