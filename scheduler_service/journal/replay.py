"""Does again what a journal says was done, and compares what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError

from scheduler_service.core.plan import StepEvents, StepOutcome
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.journal.checkpoint import CheckpointUnusable, check_structure, load_core
from scheduler_service.journal.decisions import describe_error
from scheduler_service.journal.difference import FieldDifference, find_difference
from scheduler_service.journal.journal import JOURNAL_VERSION
from scheduler_service.journal.journaled_core import JournaledCore
from scheduler_service.journal.params_codec import decode_config
from scheduler_service.journal.request_codec import decode_request
from scheduler_service.journal.segment_file import JournalUnreadable, SegmentReader
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import journal_pb2 as journal

_SETUP = frozenset({"core_created", "core_checkpoint"})


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that is not the recorded one.

    `call`: of the core; `step_id`: the step it was about, or the latest before it. `error`: what
    the call raised in the replay, in full.
    """

    event: int
    core: int
    address: str
    call: str
    step_id: int
    field: FieldDifference
    error: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a core, by its name there; `request`: that it was given, if it was.

    `ask` returns what the core does; of `apply` also the outcome, which goes before that.
    """

    name: str
    ask: Callable[[], object]
    request: Request | None = None


@dataclass(slots=True)
class Report:
    """What a replay found. `first_event`, `num_events`: those that were complete and were replayed.

    `is_cut`: the file ends in the middle of an entry.
    """

    software_version: str
    first_event: int
    num_events: int = 0
    num_cores: int = 0
    num_steps: int = 0
    is_cut: bool = False
    difference: Difference | None = None


class Witness(Protocol):
    """Looks on while a journal is replayed; changes nothing."""

    def called(self, address: str, core: Scheduler, call: Call, result: object) -> None:
        """The core of the executor at `address` was asked, and has answered."""
        ...


def replay(path: Path, witness: Witness | None = None) -> Report:
    """Replays one segment, up to the first difference. Raises JournalUnreadable."""
    reader = SegmentReader(path)
    entries = iter(reader)
    header = _read_header(entries)
    report = Report(header.software_version, header.first_event)
    cores = _Cores(witness)
    for entry in entries:
        number = report.first_event + report.num_events
        try:
            report.difference = cores.replay(entry, number)
        except (CheckpointUnusable, DecodeError, ValueError) as error:
            written_by = f"written by version {header.software_version}"
            raise JournalUnreadable(f"at event {number}, {written_by}: {error}") from error
        report.num_events += entry.WhichOneof("event") != "core_checkpoint"
        report.num_steps += entry.WhichOneof("event") == "apply"
        if report.difference is not None:
            break
    report.num_cores = cores.num_cores
    report.is_cut = reader.is_cut
    return report


def _read_header(entries: Iterator[journal.JournalEntry]) -> journal.JournalHeader:
    entry = next(entries, None)
    if entry is None or not entry.HasField("header"):
        raise JournalUnreadable("it does not begin as a journal does")
    version = entry.header.journal_version
    if version != JOURNAL_VERSION:
        raise JournalUnreadable(
            f"journal_version is {version}; this software reads {JOURNAL_VERSION}"
        )
    return entry.header


class _Capture:
    """A recorder that keeps the latest entry. Nothing may fail here."""

    is_recording = True
    position = "replay"

    def __init__(self) -> None:
        self._latest: journal.JournalEntry | None = None

    def attempt(self, action: Callable[[], None]) -> None:
        action()

    def append(self, entry: journal.JournalEntry) -> None:
        self._latest = entry

    def flush(self) -> None:
        pass

    def forget(self, number: int) -> None:
        pass

    def take(self) -> journal.JournalEntry | None:
        entry, self._latest = self._latest, None
        return entry


class _Cores:
    """The cores of a journal, made anew."""

    def __init__(self, witness: Witness | None) -> None:
        self._witness = witness
        self._cores: dict[int, JournaledCore] = {}
        self._addresses: dict[int, str] = {}
        self._capture = _Capture()

    @property
    def num_cores(self) -> int:
        """Cores there were."""
        return len(self._addresses)

    def replay(self, entry: journal.JournalEntry, number: int) -> Difference | None:
        """One entry. Raises ValueError, DecodeError, CheckpointUnusable if it is none."""
        call = entry.WhichOneof("event")
        if call in _SETUP:
            self._set_up(entry)
            return None
        if call is None or entry.core not in self._cores:
            raise ValueError(f"core {entry.core} was never created, or nothing happened to it")
        core = self._cores[entry.core]
        prepared = _prepare(core, entry)
        if entry.HasField("now_ns"):
            core.tick(entry.now_ns)
        raised: Exception | None = None
        try:
            result = prepared.ask()
        except Exception as error:  # to be compared with what was raised then
            raised = error
        else:
            if self._witness is not None:
                address = self._addresses[entry.core]
                self._witness.called(address, core.scheduler, prepared, result)
        replayed = self._capture.take()
        if replayed is None:
            replayed = journal.JournalEntry(core=entry.core)
            replayed.raised = "" if raised is None else describe_error(raised)
        field = find_difference(entry, replayed)
        if field is None:
            return None
        error_text = "" if raised is None else f"{type(raised).__name__}: {raised}"
        step_id = _step_id(entry) or core.scheduler.last_step_id
        address = self._addresses[entry.core]
        return Difference(number, entry.core, address, call, step_id, field, error_text)

    def _set_up(self, entry: journal.JournalEntry) -> None:
        if entry.HasField("core_created"):
            created = entry.core_created
            identity = created.identity
            scheduler = Scheduler(decode_config(created.config), created.last_step_id)
        else:
            check_structure(entry.core_checkpoint.core_structure)
            identity = entry.core_checkpoint.identity
            scheduler = load_core(entry.core_checkpoint.scheduler)
        self._cores[entry.core] = JournaledCore(scheduler, entry.core, identity, self._capture)
        self._addresses[entry.core] = identity.address


def _prepare(core: JournaledCore, entry: journal.JournalEntry) -> Call:
    """The call that an entry records. Raises ValueError if it has no such thing."""
    match entry.WhichOneof("event"):
        case "add":
            added = decode_request(entry.add.request)
            return Call("add", lambda: core.add(added), added)
        case "readmit":
            readmitted = decode_request(entry.readmit.request)
            return Call("readmit", lambda: core.readmit(readmitted), readmitted)
        case "abort":
            return Call("abort", lambda: core.abort(entry.abort.request_id))
        case "withdraw":
            return Call("withdraw", lambda: core.withdraw(entry.withdraw.request_id))
        case "evacuate":
            return Call("evacuate", core.evacuate)
        case "schedule":
            return Call("schedule", core.schedule)
        case "apply":
            result = executor.StepResult.FromString(entry.apply.result)
            return Call("apply", lambda: _apply(core, result, entry.apply.num_rows))
        case "take_ended":
            return Call("take_ended", core.take_ended)
        case other:
            raise ValueError(f"{other} is no event of a core")


def _apply(
    core: JournaledCore, result: executor.StepResult, num_rows: int
) -> tuple[StepOutcome, StepEvents]:
    outcome = core.decode(result, num_rows)
    return outcome, core.apply(outcome)


def _step_id(entry: journal.JournalEntry) -> int:
    """The step that an entry is about; 0 if it is about none."""
    if entry.HasField("apply"):
        return executor.StepResult.FromString(entry.apply.result).step_id
    if entry.HasField("schedule") and entry.schedule.HasField("batch"):
        return executor.ScheduleBatch.FromString(entry.schedule.batch).step_id
    return 0
