"""Journal of a scheduler: records its events and effects in a file, or nowhere.

`FileJournal` writes a file. `Entries` makes the entries, for a recording and for a replay.
"""

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
from scheduler_service.scheduler import Effect, EngineFailed, Event, Scheduler, SendStep, effects
from scheduler_service.scheduler.values import FleetConfig, StepPlan
from scheduler_service.step_codec import EncodedBatch, ReceivedResult, encode_plan
from splitserve.scheduler.v1 import journal_pb2 as journal

JOURNAL_VERSION = 3
# Fill level at which a segment ends, so that an event of a nearly full segment still has room.
_FULL_RATIO = 7 / 8
_EVENTS_BETWEEN_FLUSHES = 64

_log = logging.getLogger(__name__)


class Recording(Protocol):
    """Record of one event, completed after the scheduler has handled the event."""

    def done(self, found: Sequence[Effect], batches: Sequence[EncodedBatch]) -> None:
        """Completes the record. `found`: the effects, in order. `batches`: of the steps in them."""

    def raised(self, error: Exception) -> None:
        """Completes the record of an event for which the scheduler raised `error`."""


class Journal(Protocol):
    """Records the events that a scheduler handles, and the effects that it returns."""

    @property
    def position(self) -> str:
        """Position of the latest event, for people."""

    def begin(self, scheduler: Scheduler, config: FleetConfig) -> None:
        """Records that `scheduler` was made with `config`.

        Must be called once, before any event.
        """

    def record(self, event: Event, now_ns: int, received: ReceivedResult | None) -> Recording:
        """Begins the record of an event that is about to be handled.

        `received`: message from which the outcome of a `StepCompleted` was decoded.
        """

    def close(self) -> None:
        """Writes the buffered records and closes the journal."""


class NoJournal:
    """Records nothing. Implements `Journal` and `Recording`."""

    position = ""

    def begin(self, scheduler: Scheduler, config: FleetConfig) -> None:
        pass

    def record(self, event: Event, now_ns: int, received: ReceivedResult | None) -> Recording:
        return self

    def done(self, found: Sequence[Effect], batches: Sequence[EncodedBatch]) -> None:
        pass

    def raised(self, error: Exception) -> None:
        pass

    def close(self) -> None:
        pass


_NOTHING = NoJournal()


class JournalUnusable(Exception):
    """Error: the journal file cannot be written. The message names the file and the reason."""


class JournalTooSmall(Exception):
    """Error: the state of the scheduler leaves no room for events in a segment."""


class FileJournal:
    """Records in the file `path` and keeps the previous segment in `path`.1.

    Both segments together take up to `max_bytes`. Raises OSError if `path` cannot be written. Later
    errors end the recording and nothing else. Implements `Journal`, and `Recording` of the latest
    event.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._segment_bytes = max_bytes // 2
        self._scheduler: Scheduler | None = None
        self._entries = Entries()
        self._entry = journal.JournalEntry()
        self._num_events = 0
        self._num_unflushed = 0
        scheduler_structure()  # cached now, as it takes a while and later steps must not wait
        self._file = SegmentFile(path)
        self._is_recording = True
        self._file.write(self._header())
        self._file.flush()

    # -- Journal -------------------------------------------------------------------------------

    @property
    def position(self) -> str:
        """Name of the file and number of the latest event, as `path#number`."""
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

    def record(self, event: Event, now_ns: int, received: ReceivedResult | None) -> Recording:
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

    # -- State and helpers ---------------------------------------------------------------------

    @property
    def is_recording(self) -> bool:
        """Whether events are recorded: the journal is open and no error has ended the recording."""
        return self._is_recording

    @property
    def num_bytes(self) -> int:
        """Size of the current segment in bytes."""
        return self._file.num_bytes

    @property
    def _is_computing(self) -> bool:
        return self._scheduler is not None and self._scheduler.is_computing

    def _attempt(self, action: Callable[[], None]) -> None:
        """Runs a part of the recording. Any error ends the recording and is only logged."""
        if not self._is_recording:
            return
        try:
            action()
        except Exception:  # no request may fail because of the journal
            _log.exception("journal_stopped position=%s", self.position)
            self._stop()

    def _append(self, entry: journal.JournalEntry) -> None:
        """Writes an entry whose effects are complete.

        Raises OSError, PicklingError, JournalTooSmall. Begins a new segment when the current one is
        full. An entry that does not fit is not written: the checkpoint of the new segment already
        includes its effects.
        """
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
        """Begins a new segment with a checkpoint of the scheduler after the last event.

        Raises OSError, PicklingError, JournalTooSmall.
        """
        entries = [self._header(), self.checkpoint()]
        num_bytes = sum(FRAME_BYTES + len(entry) for entry in entries)
        if num_bytes > self._segment_bytes * _FULL_RATIO / 2:
            raise JournalTooSmall(
                f"the scheduler state takes {num_bytes} bytes, a segment has {self._segment_bytes}"
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
        """Returns a serialized entry with the present state of the scheduler.

        Raises PicklingError.
        """
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
    """Returns the journal in `path`; a `NoJournal` if `path` is None. Raises JournalUnusable."""
    if path is None:
        return NoJournal()
    try:
        journal_of_process = FileJournal(Path(path), max_bytes)
    except OSError as error:
        raise JournalUnusable(f"--journal {path}: {error.strerror or error}") from error
    _log.info("journal_opened path=%s max_bytes=%d", path, max_bytes)
    return journal_of_process


def software_version() -> str:
    """Returns the installed version of splitserve, or "unknown"."""
    try:
        return metadata.version("splitserve")
    except metadata.PackageNotFoundError:
        return "unknown"


# -- Entries of the journal ------------------------------------------------------------------------


class Entries:
    """Makes the journal entries of one scheduler, while it runs or in a replay.

    `executors`: identities of the scheduler's executors by address, with the epochs of their
    batches.
    """

    def __init__(self, executors: Iterable[journal.ExecutorIdentity] = ()) -> None:
        self.executors = {each.address: each for each in executors}

    def begin(
        self, event: Event, now_ns: int, received: ReceivedResult | None = None
    ) -> journal.JournalEntry:
        """Returns the entry of an event that is about to be handled, without effects.

        `received`: message from which the outcome of a `StepCompleted` was decoded.
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
        """Adds the effects to `entry`.

        `batches`: encoded batches of the first steps among the effects. Further steps are encoded
        here.
        """
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
        """Sets the error that the scheduler raised instead of returning effects."""
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
        # A new life of the executor may have joined at the same address.
        if known is not None and known.executor_epoch == gone.epoch:
            del self.executors[gone.address]
