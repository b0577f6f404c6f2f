"""Text log format: one line per event, whatever text clients and peers supply."""

from __future__ import annotations

import logging
import traceback

from splitserve_rpc.log_context import context_fields
from splitserve_rpc.printable import printable

# Packages whose events are logged at the configured level. Libraries are logged from WARNING on,
# since their details of a connection may contain its payload.
LOGGING_PACKAGES = (
    "executor_service",
    "scheduler_service",
    "splitserve_bench",
    "splitserve_cli",
    "splitserve_client",
    "splitserve_gateway",
    "splitserve_grammars",
    "splitserve_kernels",
    "splitserve_keys",
    "splitserve_live",
    "splitserve_metrics",
    "splitserve_options",
    "splitserve_rpc",
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
