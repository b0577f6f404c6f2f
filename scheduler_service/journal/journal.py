"""Journal of a scheduler: what it is told, and what it decides, in a file or nowhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Protocol

from scheduler_service.journal.checkpoint import dump_state, scheduler_structure
from scheduler_service.journal.event_codec import describe_error, encode_effect, encode_event
from scheduler_service.journal.request_codec import encode_fields
from scheduler_service.journal.segment_file import FRAME_BYTES, SegmentFile
from scheduler_service.scheduler import effects
from scheduler_service.scheduler.effects import Effect, EngineFailed, SendStep
from scheduler_service.scheduler.events import Event
from scheduler_service.scheduler.scheduler import Scheduler
from scheduler_service.scheduler.values.config import FleetConfig
from scheduler_service.scheduler.values.plan import StepPlan
from scheduler_service.step_codec import EncodedBatch, Received, encode_plan
from splitserve.scheduler.v1 import journal_pb2 as journal

JOURNAL_VERSION = 3
# A segment ends here, so that an event that comes when it is nearly full still has room.
_FULL_RATIO = 7 / 8
_EVENTS_BETWEEN_FLUSHES = 64

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

    def begin(self, scheduler: Scheduler, config: FleetConfig) -> None:
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

    def begin(self, scheduler: Scheduler, config: FleetConfig) -> None:
        pass

    def record(self, event: Event, now_ns: int, received: Received | None) -> Recording:
        return self

    def done(self, found: Sequence[Effect], batches: Sequence[EncodedBatch]) -> None:
        pass

    def raised(self, error: Exception) -> None:
        pass

    def close(self) -> None:
        pass


_NOTHING = NoJournal()


class JournalUnusable(Exception):
    """Its file cannot be written; the message names it and says why."""


class JournalTooSmall(Exception):
    """The state of the scheduler leaves no room for events."""


class FileJournal:
    """Records in `path` and, of earlier events, `path`.1; both together take up to `max_bytes`.

    Raises OSError if `path` cannot be written. Later errors end the recording and nothing else.
    Implements `Journal`, and `Recording` of the latest event.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._segment_bytes = max_bytes // 2
        self._scheduler: Scheduler | None = None
        self._entries = Entries()
        self._entry = journal.JournalEntry()
        self._num_events = 0
        self._num_unflushed = 0
        scheduler_structure()  # takes a while, for which no step is to wait later
        self._file = SegmentFile(path)
        self._is_recording = True
        self._file.write(self._header())
        self._file.flush()

    # -- Journal -------------------------------------------------------------------------------

    @property
    def position(self) -> str:
        """The number of the latest event, after the name of the file."""
        return f"{self._path}#{self._num_events}"

    def begin(self, scheduler: Scheduler, config: FleetConfig) -> None:
        self._scheduler = scheduler

        def write() -> None:
            created = journal.SchedulerCreated()
            encode_fields(config, created.config)
            entry = journal.JournalEntry(scheduler_created=created)
            self._file.write(entry.SerializeToString())
            self._file.flush()

        self._attempt(write)

    def record(self, event: Event, now_ns: int, received: Received | None) -> Recording:
        if not self._is_recording:
            return _NOTHING
        self._num_events += 1

        def begin() -> None:
            self._entry = self._entries.begin(event, now_ns, received)

        self._attempt(begin)
        return self

    def close(self) -> None:
        self._flush()
        self._stop()

    # -- Recording -----------------------------------------------------------------------------

    def done(self, found: Sequence[Effect], batches: Sequence[EncodedBatch]) -> None:
        def write() -> None:
            self._entries.complete(self._entry, found, batches)
            self._append(self._entry)
            kinds = {type(effect) for effect in found}
            is_idle = SendStep not in kinds and not self._is_computing
            if is_idle or EngineFailed in kinds:
                self._flush()

        self._attempt(write)

    def raised(self, error: Exception) -> None:
        def write() -> None:
            self._entries.fail(self._entry, error)
            self._append(self._entry)
            self._flush()

        self._attempt(write)

    # -- parts ---------------------------------------------------------------------------------

    @property
    def is_recording(self) -> bool:
        """Whether events are recorded: nothing went wrong, and the journal is open."""
        return self._is_recording

    @property
    def num_bytes(self) -> int:
        """Bytes of the current segment."""
        return self._file.num_bytes

    @property
    def _is_computing(self) -> bool:
        return self._scheduler is not None and self._scheduler.is_computing

    def _attempt(self, action: Callable[[], None]) -> None:
        """Runs a part of the recording; whatever it raises ends the recording, and nothing else."""
        if not self._is_recording:
            return
        try:
            action()
        except Exception:  # nobody's request is to suffer from it
            _log.exception("journal_stopped position=%s", self.position)
            self._stop()

    def _append(self, entry: journal.JournalEntry) -> None:
        """Writes an entry whose effects the scheduler has. Raises OSError, PicklingError."""
        self._num_unflushed += 1
        written = entry.SerializeToString()
        num_bytes = self._file.num_bytes + FRAME_BYTES + len(written)
        fits = num_bytes <= self._segment_bytes
        if fits:
            self._file.write(written)
        if not fits or self._file.num_bytes > self._segment_bytes * _FULL_RATIO:
            self._begin_segment()
        elif self._num_unflushed >= _EVENTS_BETWEEN_FLUSHES:
            self._flush()

    def _flush(self) -> None:
        self._num_unflushed = 0
        self._attempt(self._file.flush)

    def _begin_segment(self) -> None:
        """Goes on in a new file, which begins with the scheduler as it is after the last event.

        Raises OSError, PicklingError, JournalTooSmall.
        """
        entries = [self._header(), self.checkpoint()]
        num_bytes = sum(FRAME_BYTES + len(entry) for entry in entries)
        if num_bytes > self._segment_bytes * _FULL_RATIO / 2:
            raise JournalTooSmall(
                f"the state of the scheduler takes {num_bytes} bytes, a segment "
                f"{self._segment_bytes}"
            )
        self._file.rotate()
        for entry in entries:
            self._file.write(entry)
        self._file.flush()
        _log.info(
            "journal_segment_begun position=%s num_executors=%d num_bytes=%d",
            self.position,
            len(self._entries.executors),
            num_bytes,
        )

    def _header(self) -> bytes:
        header = journal.JournalHeader(
            journal_version=JOURNAL_VERSION,
            software_version=software_version(),
            first_event=self._num_events + 1,
        )
        return journal.JournalEntry(header=header).SerializeToString()

    def checkpoint(self) -> bytes:
        """Returns the entry of the scheduler as it is now. Raises PicklingError."""
        checkpoint = journal.SchedulerCheckpoint(
            scheduler=dump_state(self._scheduler),
            structure=scheduler_structure(),
            executors=self._entries.executors.values(),
        )
        return journal.JournalEntry(scheduler_checkpoint=checkpoint).SerializeToString()

    def _stop(self) -> None:
        self._is_recording = False
        self._scheduler = None
        with suppress(OSError):
            self._file.close()


def open_journal(path: str | None, max_bytes: int) -> Journal:
    """The journal in `path`; none if there is no path. Raises JournalUnusable."""
    if path is None:
        return NoJournal()
    try:
        journal_of_process = FileJournal(Path(path), max_bytes)
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


# -- Entries of the journal: made while the scheduler runs, and made again by a replay -------------


class Entries:
    """Makes the entries of one scheduler.

    `executors`: those of the scheduler by address, with the epochs of their batches.
    """

    def __init__(self, executors: Iterable[journal.ExecutorIdentity] = ()) -> None:
        self.executors = {each.address: each for each in executors}

    def begin(
        self, event: Event, now_ns: int, received: Received | None = None
    ) -> journal.JournalEntry:
        """Returns the entry of an event that is about to be handled, without effects.

        `received`: the message that the outcome of a `StepCompleted` was decoded from.
        """
        entry = journal.JournalEntry(now_ns=now_ns)
        encode_event(event, received, entry)
        return entry

    def complete(
        self,
        entry: journal.JournalEntry,
        found: Sequence[effects.Effect],
        batches: Sequence[EncodedBatch] = (),
    ) -> None:
        """Adds the effects. `batches`: of the first steps among them; others are encoded here."""
        if entry.HasField("executor_joined"):
            joined = entry.executor_joined.identity
            self.executors[joined.address] = joined
        encoded = iter(batches)
        for effect in found:
            batch = b""
            if isinstance(effect, effects.SendStep):
                sent = next(encoded, None) or self._encode(effect.address, effect.plan)
                batch = sent.data
            encode_effect(effect, entry.effects.add(), batch)
            if isinstance(effect, effects.ExecutorGone):
                self._forget(effect)

    def fail(self, entry: journal.JournalEntry, error: Exception) -> None:
        """Says that the scheduler raised `error`, and returned no effects."""
        entry.raised = describe_error(error)

    def _encode(self, address: str, plan: StepPlan) -> EncodedBatch:
        identity = self.executors[address]
        return encode_plan(
            plan,
            scheduler_epoch=identity.scheduler_epoch,
            executor_epoch=identity.executor_epoch,
        )

    def _forget(self, gone: effects.ExecutorGone) -> None:
        known = self.executors.get(gone.address)
        # A new life may have joined at the address of the one that is gone.
        if known is not None and known.executor_epoch == gone.epoch:
            del self.executors[gone.address]
