"""Where recorded cores come from: the journal of a scheduler process, or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Protocol

from scheduler_service.core.config import FleetConfig, SchedulerConfig
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.journal.checkpoint import core_structure
from scheduler_service.journal.core import Core
from scheduler_service.journal.journaled_core import JournaledCore
from scheduler_service.journal.params_codec import encode_fields
from scheduler_service.journal.segment_file import FRAME_BYTES, SegmentFile
from scheduler_service.scheduler import scheduler as fleet
from scheduler_service.scheduler.effects import Effect
from scheduler_service.scheduler.events import Event
from scheduler_service.step_codec import EncodedBatch, Received
from splitserve.scheduler.v1 import journal_pb2 as journal

JOURNAL_VERSION = 2
# A segment ends here, so that an event that comes when it is nearly full still has room.
_FULL_RATIO = 7 / 8
_EVENTS_BETWEEN_FLUSHES = 256

_log = logging.getLogger(__name__)


class Recording(Protocol):
    """The record of one event: completed once the scheduler has handled it."""

    def done(self, found: Sequence[Effect], batches: Sequence[EncodedBatch]) -> None:
        """`found` are the effects, in order; `batches`: of the steps among them."""

    def raised(self, error: Exception) -> None:
        """The scheduler raised instead."""


class Journal(Protocol):
    """Records what a scheduler is told, and what it decides."""

    @property
    def position(self) -> str:
        """Where the latest event is, for people."""

    def begin(self, scheduler: fleet.Scheduler, config: FleetConfig) -> None:
        """Records that `scheduler` was made with `config`. Called once, before any event."""

    def record(self, event: Event, now_ns: int, received: Received | None) -> Recording:
        """Begins the record of an event that is about to be handled.

        `received`: the message that the outcome of a `StepCompleted` was decoded from.
        """

    def close(self) -> None:
        """Writes what is left."""


class NoJournal:
    """Records nothing. Implements `Journal` and `Recording`."""

    position = ""

    def begin(self, scheduler: fleet.Scheduler, config: FleetConfig) -> None:
        pass

    def record(self, event: Event, now_ns: int, received: Received | None) -> Recording:
        return self

    def done(self, found: Sequence[Effect], batches: Sequence[EncodedBatch]) -> None:
        pass

    def raised(self, error: Exception) -> None:
        pass

    def close(self) -> None:
        pass


class JournalUnusable(Exception):
    """Its file cannot be written; the message names it and says why."""


class JournalTooSmall(Exception):
    """The state of the cores leaves no room for events."""


class FileJournal:
    """Records in `path` and, of earlier events, `path`.1; both together take up to `max_bytes`.

    Raises OSError if `path` cannot be written. Later errors end the recording and nothing else.
    """

    def __init__(self, path: Path, max_bytes: int, scheduler_epoch: int) -> None:
        self._path = path
        self._segment_bytes = max_bytes // 2
        self._scheduler_epoch = scheduler_epoch
        self._live: dict[int, JournaledCore] = {}
        self._num_cores = 0
        self._num_events = 0
        self._num_unflushed = 0
        core_structure()  # takes a while, for which no step is to wait later
        self._file = SegmentFile(path)
        self._is_recording = True
        self._file.write(self._header())
        self._file.flush()

    # -- cores ---------------------------------------------------------------------------------

    def core(
        self,
        config: SchedulerConfig,
        last_step_id: int,
        address: str,
        executor_epoch: int,
        scheduler_epoch: int | None = None,
    ) -> Core:
        scheduler = Scheduler(config, last_step_id)
        if not self._is_recording:
            return scheduler
        self._num_cores += 1
        number = self._num_cores
        identity = journal.CoreIdentity(
            address=address,
            executor_epoch=executor_epoch,
            scheduler_epoch=scheduler_epoch or self._scheduler_epoch,
        )
        core = self._live[number] = JournaledCore(scheduler, number, identity, self)

        def write() -> None:
            created = journal.CoreCreated(identity=identity, last_step_id=last_step_id)
            encode_fields(config, created.config)
            self.append(journal.JournalEntry(core=number, core_created=created))

        self.attempt(write)
        return core

    # -- Recorder ------------------------------------------------------------------------------

    @property
    def is_recording(self) -> bool:
        return self._is_recording

    @property
    def position(self) -> str:
        """The number of the latest event, after the name of the file."""
        return f"{self._path}#{self._num_events}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the current segment."""
        return self._file.num_bytes

    def attempt(self, action: Callable[[], None]) -> None:
        if not self._is_recording:
            return
        try:
            action()
        except Exception:  # nobody's request is to suffer from it
            _log.exception("journal_stopped position=%s", self.position)
            self._stop()

    def append(self, entry: journal.JournalEntry) -> None:
        """Raises OSError, PicklingError, JournalTooSmall."""
        self._num_events += 1
        self._num_unflushed += 1
        written = entry.SerializeToString()
        num_bytes = self._file.num_bytes + FRAME_BYTES + len(written)
        fits = num_bytes <= self._segment_bytes
        if fits:
            self._file.write(written)
        if not fits or self._file.num_bytes > self._segment_bytes * _FULL_RATIO:
            self._begin_segment()
        elif self._num_unflushed >= _EVENTS_BETWEEN_FLUSHES:
            self.flush()

    def flush(self) -> None:
        self._num_unflushed = 0
        self.attempt(self._file.flush)

    def forget(self, number: int) -> None:
        self._live.pop(number, None)

    def close(self) -> None:
        self.flush()
        self._stop()

    # -- segments ------------------------------------------------------------------------------

    def _begin_segment(self) -> None:
        """Goes on in a new file, which begins with the cores as they are after the last event."""
        checkpoints = (core.checkpoint().SerializeToString() for core in self._live.values())
        entries = [self._header(), *checkpoints]
        num_bytes = sum(FRAME_BYTES + len(entry) for entry in entries)
        if num_bytes > self._segment_bytes * _FULL_RATIO / 2:
            raise JournalTooSmall(
                f"the state of the cores takes {num_bytes} bytes, a segment {self._segment_bytes}"
            )
        self._file.rotate()
        for entry in entries:
            self._file.write(entry)
        self._file.flush()
        _log.info(
            "journal_segment_begun position=%s num_cores=%d num_bytes=%d",
            self.position,
            len(self._live),
            num_bytes,
        )

    def _header(self) -> bytes:
        header = journal.JournalHeader(
            journal_version=JOURNAL_VERSION,
            software_version=software_version(),
            first_event=self._num_events + 1,
        )
        return journal.JournalEntry(header=header).SerializeToString()

    def _stop(self) -> None:
        self._is_recording = False
        self._live.clear()
        with suppress(OSError):
            self._file.close()


def open_journal(path: str | None, max_bytes: int, scheduler_epoch: int) -> Journal:
    """The journal in `path`; none if there is no path. Raises JournalUnusable."""
    if path is None:
        return NoJournal()
    try:
        journal_of_process = FileJournal(Path(path), max_bytes, scheduler_epoch)
    except OSError as error:
        raise JournalUnusable(f"--journal {path}: {error.strerror or error}") from error
    _log.info("journal_opened path=%s max_bytes=%d", path, max_bytes)
    return journal_of_process


def software_version() -> str:
    """The version of splitserve."""
    try:
        return metadata.version("splitserve")
    except metadata.PackageNotFoundError:
        return "unknown"
