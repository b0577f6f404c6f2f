"""Replay of a journal: handles the recorded events again and compares the effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from google.protobuf.message import DecodeError, Message

from scheduler_service.journal.checkpoint import CheckpointUnusable, check_structure, load_state
from scheduler_service.journal.event_codec import decode_event
from scheduler_service.journal.journal import JOURNAL_VERSION, Entries
from scheduler_service.journal.request_codec import decode_fleet_config
from scheduler_service.journal.segment_file import JournalUnreadable, SegmentReader
from scheduler_service.scheduler import Effect, Event, Scheduler
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import journal_pb2 as journal

_NO_EFFECT = journal.JournaledEffect()


@dataclass(frozen=True, slots=True)
class Difference:
    """First effect that differs from the record.

    `event`: number of the event. `kind`: name of the event. `address`: executor of the effect or
    the event, empty for none. `step_id`: step of the effect or the event, else the latest step of
    that executor; 0 for none. `error`: error that the scheduler raised in the replay, in full.
    """

    event: int
    kind: str
    address: str
    step_id: int
    field: FieldDifference
    error: str = ""


@dataclass(slots=True)
class Report:
    """Result of a replay. `first_event`, `num_events`: complete events that were replayed.

    `num_executors`: lives of executors. `num_steps`: answered steps. `is_cut`: the file ends in the
    middle of an entry. `difference`: None if all effects are equal.
    """

    software_version: str
    first_event: int
    num_events: int = 0
    num_executors: int = 0
    num_steps: int = 0
    is_cut: bool = False
    difference: Difference | None = None


class ReplayObserver(Protocol):
    """Observer of a replay. Changes nothing."""

    def begins(self, scheduler: Scheduler) -> None:
        """Called once with the scheduler, which may already have executors and requests."""
        ...

    def handles(self, scheduler: Scheduler, event: Event, now_ns: int) -> None:
        """Called when the scheduler is about to handle the event."""
        ...

    def handled(self, event: Event, effects: list[Effect], now_ns: int) -> None:
        """Called when the scheduler has handled the event and returned the effects."""
        ...


def replay(path: Path, witness: ReplayObserver | None = None) -> Report:
    """Replays one segment up to the first difference. Raises JournalUnreadable."""
    reader = SegmentReader(path)
    entries = iter(reader)
    header = _read_header(entries)
    report = Report(header.software_version, header.first_event)
    replayed: _Replay | None = None
    for entry in entries:
        number = report.first_event + report.num_events
        try:
            if replayed is None:
                replayed = _begin(entry, witness)
                continue
            report.difference = replayed.handle(entry, number)
        except (CheckpointUnusable, DecodeError, ValueError) as error:
            written_by = f"written by version {header.software_version}"
            raise JournalUnreadable(f"at event {number}, {written_by}: {error}") from error
        report.num_events += 1
        report.num_steps += entry.WhichOneof("event") == "step_completed"
        if report.difference is not None:
            break
    report.num_executors = 0 if replayed is None else replayed.num_executors
    report.is_cut = reader.is_cut
    return report


def _read_header(entries: Iterator[journal.JournalEntry]) -> journal.JournalHeader:
    entry = next(entries, None)
    if entry is None or not entry.HasField("header"):
        raise JournalUnreadable("not a journal: the first entry is not a header")
    version = entry.header.journal_version
    if version != JOURNAL_VERSION:
        raise JournalUnreadable(
            f"journal_version is {version}; this software reads {JOURNAL_VERSION}"
        )
    return entry.header


def _begin(entry: journal.JournalEntry, witness: ReplayObserver | None) -> _Replay:
    """Makes the initial scheduler of a segment.

    Raises CheckpointUnusable, DecodeError, ValueError.
    """
    match entry.WhichOneof("event"):
        case "scheduler_created":
            config = decode_fleet_config(entry.scheduler_created.config)
            return _Replay(Scheduler(config), Entries(), witness)
        case "scheduler_checkpoint":
            checkpoint = entry.scheduler_checkpoint
            check_structure(checkpoint.structure)
            scheduler = load_state(checkpoint.scheduler, Scheduler)
            return _Replay(scheduler, Entries(checkpoint.executors), witness)
        case other:
            raise ValueError(
                f"the first event is {other}; allowed: scheduler_created, scheduler_checkpoint"
            )


class _Replay:
    """Scheduler that handles the events of a journal again."""

    def __init__(
        self, scheduler: Scheduler, entries: Entries, witness: ReplayObserver | None
    ) -> None:
        self._scheduler = scheduler
        self._entries = entries
        self._witness = witness
        # Lives of executors, as (address, epoch).
        self._lives = {(e.address, e.executor_epoch) for e in entries.executors.values()}
        if witness is not None:
            witness.begins(scheduler)

    @property
    def num_executors(self) -> int:
        """Number of lives of executors in the segment."""
        return len(self._lives)

    def handle(self, recorded: journal.JournalEntry, number: int) -> Difference | None:
        """Handles the event of a recorded entry; returns the first difference, or None.

        Raises ValueError or DecodeError if the entry has no valid event.
        """
        event = decode_event(recorded)
        now_ns = recorded.now_ns
        replayed = journal.JournalEntry()
        if recorded.HasField("executor_joined"):
            replayed.executor_joined.CopyFrom(recorded.executor_joined)
        if self._witness is not None:
            self._witness.handles(self._scheduler, event, now_ns)
        error_text = ""
        try:
            found = self._scheduler.handle(event, now_ns)
        except Exception as error:  # to be compared with the recorded error
            self._entries.fail(replayed, error)
            error_text = f"{type(error).__name__}: {error}"
        else:
            self._entries.complete(replayed, found)
            if self._witness is not None:
                self._witness.handled(event, found, now_ns)
        if recorded.HasField("executor_joined"):
            joined = recorded.executor_joined.identity
            self._lives.add((joined.address, joined.executor_epoch))
        return self._compare(recorded, replayed, number, error_text)

    def _compare(
        self,
        recorded: journal.JournalEntry,
        replayed: journal.JournalEntry,
        number: int,
        error_text: str,
    ) -> Difference | None:
        if recorded.raised != replayed.raised:
            raised = FieldDifference("raised", recorded.raised, replayed.raised)
            return self._difference(recorded, None, number, raised, error_text)
        pairs = zip_longest(recorded.effects, replayed.effects, fillvalue=_NO_EFFECT)
        for index, (expected, replayed_effect) in enumerate(pairs):
            field = find_difference(expected, replayed_effect, f"effects[{index}]")
            if field is not None:
                effect = replayed_effect if expected is _NO_EFFECT else expected
                return self._difference(recorded, effect, number, field, error_text)
        return None

    def _difference(
        self,
        entry: journal.JournalEntry,
        effect: journal.JournaledEffect | None,
        number: int,
        field: FieldDifference,
        error_text: str,
    ) -> Difference:
        kind = entry.WhichOneof("event") or ""
        event = getattr(entry, kind)
        about = None if effect is None else _part(effect, "effect")
        address = _address(about) or _address(event)
        step_id = _step_id(about) or _step_id(event)
        if not step_id and (known := self._scheduler.executors.get(address)) is not None:
            step_id = known.engine.last_step_id
        return Difference(number, kind, address, step_id, field, error_text)


def _part(message: Message, oneof: str) -> Message | None:
    name = message.WhichOneof(oneof)
    part: Message | None = None if name is None else getattr(message, name)
    return part


def _address(message: Message | None) -> str:
    """Returns the address of an event or effect; empty for none."""
    if isinstance(message, journal.ExecutorJoined):
        return message.identity.address
    return str(getattr(message, "address", ""))


def _step_id(message: Message | None) -> int:
    """Returns the step id of an event or effect; 0 for none."""
    if isinstance(message, journal.StepCompleted):
        if not message.HasField("result"):
            return message.unsent_step_id
        return executor.StepResult.FromString(message.result).step_id
    if isinstance(message, journal.StepProgressed):
        return executor.StepResult.FromString(message.result).step_id
    if isinstance(message, journal.SendStep):
        return executor.ScheduleBatch.FromString(message.batch).step_id
    return 0


# -- Comparison of two messages --------------------------------------------------------------------

NOTHING = "nothing"

# Bytes fields that contain a serialized message, by name of the field.
_MESSAGES: Mapping[str, type[Message]] = MappingProxyType(
    {"batch": executor.ScheduleBatch, "result": executor.StepResult}
)
# Columns of bytes that are not i32; see executor.proto.
_DTYPES = MappingProxyType({"seeds": "<i8", "samples": "|u1", "row_statuses": "|u1"})


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """First field in which a replay differs from the record. `field`: path of the field."""

    field: str
    recorded: str
    replayed: str


def find_difference(recorded: Message, replayed: Message, at: str = "") -> FieldDifference | None:
    """Returns the first difference of two messages of one type, or None.

    `at`: path of the messages.
    """
    for field in recorded.DESCRIPTOR.fields:
        name = field.name
        path = f"{at}.{name}" if at else name
        if field.has_presence and recorded.HasField(name) != replayed.HasField(name):
            recorded_text, replayed_text = (
                _in_short(getattr(message, name)) if message.HasField(name) else NOTHING
                for message in (recorded, replayed)
            )
            return FieldDifference(path, recorded_text, replayed_text)
        found = _compare(getattr(recorded, name), getattr(replayed, name), name, path)
        if found is not None:
            return found
    return None


def _compare(recorded: Any, replayed: Any, name: str, path: str) -> FieldDifference | None:  # noqa: ANN401
    """Returns the first difference of two values of one field, or None."""
    if recorded == replayed:
        return None
    if isinstance(recorded, Message):
        return find_difference(recorded, replayed, path)
    if isinstance(recorded, bytes):
        if name in _MESSAGES:
            parse = _MESSAGES[name].FromString
            return find_difference(parse(recorded), parse(replayed), path)
        recorded, replayed = _column(name, recorded), _column(name, replayed)
    if isinstance(recorded, (str, int, float, Mapping)):
        return FieldDifference(path, _in_short(recorded), _in_short(replayed))
    return _compare_items(recorded, replayed, name, path)


def _compare_items(recorded: Any, replayed: Any, name: str, path: str) -> FieldDifference | None:  # noqa: ANN401
    for index, (item, replayed_item) in enumerate(zip(recorded, replayed, strict=False)):
        found = _compare(item, replayed_item, name, f"{path}[{index}]")
        if found is not None:
            return found
    if len(recorded) == len(replayed):
        return None
    lengths = (f"{len(items)} elements" for items in (recorded, replayed))
    return FieldDifference(path, *lengths)


def _column(name: str, data: bytes) -> list[int] | bytes:
    dtype = np.dtype(_DTYPES.get(name, "<i4"))
    if len(data) % dtype.itemsize:
        return data
    numbers: list[int] = np.frombuffer(data, dtype).tolist()
    return numbers


def _in_short(value: object) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


_MAX_CHARS = 200
