"""The audit log in a file, written by a thread of its own."""

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
from splitserve_rpc.private_files import open_private

# Some seconds of a busy scheduler.
MAX_QUEUED = 16_384
# How long what was counted may wait to be written.
_LOOK_S = 1.0
_CLOSE_S = 5.0

_log = logging.getLogger(__name__)


class AuditUnusable(Exception):
    """The file cannot be written; the message names it and says why."""


class EventSink(Protocol):
    """What is written to; methods may raise OSError."""

    def write(self, fields: Mapping[str, object]) -> None:
        """One event."""
        ...

    def close(self) -> None:
        """Ends the writing."""
        ...


class FileAudit:
    """Implements `Audit`. What comes while the queue is full is counted, and that is written.

    What cannot be written later on is lost, and serving goes on: the log of the process says so.
    """

    def __init__(
        self,
        file: EventSink,
        now_s: Callable[[], float] = time.time,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        """`now_s`: seconds of the calendar."""
        self._now_s = now_s
        self._file = file
        self._queue: queue.Queue[tuple[float, AuditEvent] | None] = queue.Queue(max_queued)
        self._lock = threading.Lock()
        self._refused = RefusedPeers()
        # Of their own: callers who are known cannot make others out of peers.
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

    # -- the thread ----------------------------------------------------------------------------

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
    """`request_admitted` for RequestAdmitted."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def open_audit(path: str | None) -> Audit:
    """The audit log in `path`; none if there is no path. Raises AuditUnusable."""
    if path is None:
        return NoAudit()
    try:
        return FileAudit(EventFile(Path(path)))
    except OSError as error:
        raise AuditUnusable(f"--audit-log {path}: {error.strerror or error}") from error


# -- A file of JSON lines that others may move away ------------------------------------------------

_MAX_TEXT_CHARS = 256


class EventFile:
    """Appends to `path`, which is made anew where it is gone. Its methods may raise OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()
        self._is_torn = False

    def write(self, fields: Mapping[str, object]) -> None:
        """Appends a line."""
        if not self._is_current():
            file = self._open()
            self._file.close()
            self._file = file
        # What a full disk took a part of does not spoil what follows.
        line = b"\n" * self._is_torn + _line(fields)
        num_bytes = self._file.write(line) or 0
        self._is_torn = num_bytes != len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, "only a part was written")

    def close(self) -> None:
        """Ends the writing."""
        self._file.close()

    def _open(self) -> FileIO:
        # Unbuffered: a line is there as a whole, for whoever follows the file.
        return open(self._path, "ab", 0, opener=open_private)

    def _is_current(self) -> bool:
        """Whether what is open is what is found at the path."""
        ours = os.fstat(self._file.fileno())
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _line(fields: Mapping[str, object]) -> bytes:
    shown = {
        name: value[:_MAX_TEXT_CHARS] if isinstance(value, str) else value
        for name, value in fields.items()
    }
    # JSON escapes all other controls, and whatever is not ASCII.
    return json.dumps(shown).replace("\x7f", r"\u007f").encode() + b"\n"
