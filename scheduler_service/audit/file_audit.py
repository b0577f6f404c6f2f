"""Audit log in a file of JSON lines, written by a thread of its own."""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Protocol

from scheduler_service.audit.audit import (
    Audit,
    AuditEvent,
    EventsDropped,
    NoAudit,
    Refusal,
    RefusedPeers,
    RequestRefused,
)
from splitserve_common import open_private

# Most queued events: some seconds of a busy scheduler.
MAX_QUEUED = 16_384
# Longest time that counted events wait to be written, in seconds.
_LOOK_S = 1.0
_CLOSE_S = 5.0

_log = logging.getLogger(__name__)


class AuditUnusable(Exception):
    """Raised if the file cannot be written; the message names the file and the cause."""


class EventSink(Protocol):
    """Destination of events; methods may raise OSError."""

    def write(self, fields: Mapping[str, object]) -> None:
        """Writes one event."""
        ...

    def close(self) -> None:
        """Ends the writing."""
        ...


class FileAudit:
    """Audit log in a file. Implements `Audit`.

    Events that arrive while the queue is full are dropped and counted; the log gets the count.
    Events that cannot be written are lost, and serving goes on: the process log reports the
    problem.
    """

    def __init__(
        self,
        file: EventSink,
        now_s: Callable[[], float] = time.time,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        """Starts the writer thread. `now_s`: returns the calendar time in seconds since 1970."""
        self._now_s = now_s
        self._file = file
        self._queue: queue.Queue[tuple[float, AuditEvent] | None] = queue.Queue(max_queued)
        self._lock = threading.Lock()
        self._refused = RefusedPeers()
        # Kept apart from refused peers: known callers cannot push unknown peers out of the table.
        self._refused_requests = RefusedPeers()
        self._num_dropped = 0
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)
        self._thread.start()

    def record(self, event: AuditEvent) -> None:
        now_s = self._now_s()
        with self._lock:
            if isinstance(event, Refusal):
                self._put_past(now_s)
                is_request = isinstance(event, RequestRefused)
                refused = self._refused_requests if is_request else self._refused
                first = refused.add(event, now_s)
                if first is None:
                    return
                event = first
            self._put(now_s, event)

    def close(self) -> None:
        with self._lock:
            for refused in (self._refused, self._refused_requests):
                for event in refused.take_all():
                    self._put(self._now_s(), event)
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _put_past(self, now_s: float) -> None:
        for refused in (self._refused, self._refused_requests):
            for event in refused.take_past(now_s):
                self._put(now_s, event)

    def _put(self, now_s: float, event: AuditEvent) -> None:
        try:
            self._queue.put_nowait((now_s, event))
        except queue.Full:
            self._num_dropped += 1

    # -- writer thread -------------------------------------------------------------------------

    def _run(self) -> None:
        item: tuple[float, AuditEvent] | None
        while True:
            try:
                item = self._queue.get(timeout=_LOOK_S)
            except queue.Empty:
                self._write_counts()
                continue
            if item is None:
                break
            self._write(*item)
            self._write_counts()
        self._write_counts()
        with suppress(OSError):
            self._file.close()

    def _write_counts(self) -> None:
        now_s = self._now_s()
        with self._lock:
            self._put_past(now_s)
            num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            self._write(now_s, EventsDropped(num_dropped))

    def _write(self, now_s: float, event: AuditEvent) -> None:
        try:
            self._file.write(_fields(now_s, event))
        except OSError as error:
            if not self._is_failing:
                _log.error("audit_not_written problem=%r", error.strerror or str(error))
            self._is_failing = True
            with self._lock:
                self._num_dropped += event.num_events if isinstance(event, EventsDropped) else 1
        else:
            self._is_failing = False


def _fields(now_s: float, event: AuditEvent) -> dict[str, object]:
    when = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds")
    return {"time": when, "event": event_name(type(event)), **asdict(event)}


def event_name(kind: type[AuditEvent]) -> str:
    """Returns the event's name in the log: `request_admitted` for RequestAdmitted."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def open_audit(path: str | None) -> Audit:
    """Opens the audit log in `path`; a log that records nothing for None. Raises AuditUnusable."""
    if path is None:
        return NoAudit()
    try:
        return FileAudit(EventFile(Path(path)))
    except OSError as error:
        raise AuditUnusable(f"--audit-log {path}: {error.strerror or error}") from error


# -- File of JSON lines, which log rotation may move away ------------------------------------------

_MAX_TEXT_CHARS = 256


class EventFile:
    """Appends events to `path`; creates the file again if it was moved.

    Methods may raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()
        self._is_torn = False

    def write(self, fields: Mapping[str, object]) -> None:
        """Appends an event as one line."""
        if not self._is_current():
            file = self._open()
            self._file.close()
            self._file = file
        # A line that a full disk cut off must not spoil the next one.
        line = b"\n" * self._is_torn + _line(fields)
        num_bytes = self._file.write(line) or 0
        self._is_torn = num_bytes != len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, "only part of the line was written")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _open(self) -> FileIO:
        # Unbuffered: readers that follow the file see whole lines.
        return open(self._path, "ab", 0, opener=open_private)

    def _is_current(self) -> bool:
        """Returns whether the open file is still the file at the path."""
        opened = os.fstat(self._file.fileno())
        try:
            current = self._path.stat()
        except FileNotFoundError:
            return False
        return (opened.st_dev, opened.st_ino) == (current.st_dev, current.st_ino)


def _line(fields: Mapping[str, object]) -> bytes:
    shown = {
        name: value[:_MAX_TEXT_CHARS] if isinstance(value, str) else value
        for name, value in fields.items()
    }
    # JSON escapes all other control characters and non-ASCII text.
    return json.dumps(shown).replace("\x7f", r"\u007f").encode() + b"\n"
