"""Tests the journal: entries, segments, and recording that ends when the disk is full."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from scheduler_service.journal import (
    FileJournal,
    NoJournal,
    SegmentFile,
    SegmentReader,
    open_journal,
    replay,
)
from scheduler_service.journal import journal as journal_module
from scheduler_service.scheduler import Scheduler, events
from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.values import FleetConfig, StepOutcome
from splitserve.scheduler.v1 import journal_pb2 as pb
from tests.support.core.pure_fleet import PureFleet, a_request
from tests.support.core.recorded_run import (
    RandomRun,
    open_file,
    run_config,
    run_machine,
)

BOUND = 600_000
DISK_BYTES = 70_001


@pytest.fixture
def journal(path: Path) -> Iterator[FileJournal]:
    """A journal in `path`."""
    journal = open_file(path)
    yield journal
    journal.close()


def total_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.iterdir())


def entries_in(path: Path) -> list[pb.JournalEntry]:
    """All entries but the header and the creation of the scheduler."""
    return list(SegmentReader(path))[2:]


def kinds_in(path: Path) -> list[str | None]:
    return [entry.WhichOneof("event") for entry in entries_in(path)]


class KeptSegments(SegmentFile):
    """Copies each segment when it ends."""

    folder: Path

    def rotate(self) -> None:
        self.flush()
        number = len(list(self.folder.iterdir()))
        (self.folder / f"{number}.journal").write_bytes(self._path.read_bytes())
        super().rotate()
        assert total_bytes(self._path) <= BOUND


# -- what is written when ----------------------------------------------------------------------


def test_entry_has_time_event_and_effects_when_the_scheduler_handled_it(
    path: Path, journal: FileJournal
) -> None:
    recorded = PureFleet(journal=journal)
    recorded.join(run_machine())
    recorded.now_ns = 7
    recorded.submit(a_request(1))
    recorded.settle()
    journal.close()

    submitted, tick = entries_in(path)[-2:]
    assert (submitted.now_ns, submitted.request_submitted.request.request_id) == (7, "r1")
    # As it was before the scheduler had it.
    assert not submitted.request_submitted.request.HasField("submitted_ns")
    assert not submitted.effects  # the executor is about to plan a step
    assert tick.effects[0].request_assigned.address == "executor:1"
    assert {effect.WhichOneof("effect") for effect in tick.effects[1:]} == {"send_step"}


def test_events_are_on_disk_when_no_step_is_in_flight(path: Path, journal: FileJournal) -> None:
    recorded = PureFleet(journal=journal)

    recorded.join(run_machine())

    assert kinds_in(path) == ["executor_joined", "executor_connected"]
    recorded.submit(a_request(1))
    recorded.run()
    assert kinds_in(path)[-1] == "step_completed"


def test_events_are_on_disk_when_a_call_of_an_engine_raised(
    path: Path, journal: FileJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = PureFleet(journal=journal)
    recorded.join(run_machine())
    recorded.join(run_machine(address="executor:2", epoch=2))
    recorded.submit(a_request(1))
    recorded.submit(a_request(2))
    recorded.settle()

    def fail(_engine: Engine, _outcome: StepOutcome) -> None:
        raise AssertionError("block 3 freed twice")

    monkeypatch.setattr(Engine, "apply", fail)
    recorded.answer(next(recorded.machines[each] for each, held in recorded.held.items() if held))

    assert kinds_in(path)[-1] == "step_completed"
    failed = [e.engine_failed for e in entries_in(path)[-1].effects if e.HasField("engine_failed")]
    assert [(each.call, each.error) for each in failed] == [("apply", "AssertionError")]
    assert replay(path).difference is None
    monkeypatch.undo()
    difference = replay(path).difference
    assert difference is not None
    assert journal.position == f"{path}#{difference.event}"


def test_entry_says_what_was_raised_when_the_scheduler_returned_nothing(
    path: Path, journal: FileJournal
) -> None:
    recorded = PureFleet(journal=journal)
    recorded.submit(a_request(1))

    with pytest.raises(AssertionError, match="request id in use"):
        recorded.submit(a_request(1))
    journal.close()

    assert [entry.raised for entry in entries_in(path)] == ["", "AssertionError"]
    assert replay(path).difference is None


def test_batch_is_recorded_when_it_was_not_sent(path: Path, journal: FileJournal) -> None:
    scheduler = Scheduler(FleetConfig())
    journal.begin(scheduler, FleetConfig())
    joined = events.ExecutorJoined("a:1", 1, run_config(), num_credits=1)
    submitted = events.RequestSubmitted(a_request(1))
    for event in (joined, events.ExecutorConnected("a:1"), submitted, events.Tick()):
        recording = journal.record(event, 5, None)
        recording.done(scheduler.handle(event, 5), [])
    journal.close()

    (sent,) = (each for each in entries_in(path)[-1].effects if each.HasField("send_step"))
    assert sent.send_step.batch
    assert replay(path).difference is None


def test_position_is_that_of_the_event_when_it_is_being_handled(
    path: Path, journal: FileJournal
) -> None:
    recorded = PureFleet(journal=journal)
    recorded.join(run_machine())

    journal.record(events.Tick(), 1, None)

    assert journal.position == f"{path}#3"


# -- segments ----------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("queue_policy", ["fcfs", "deadline"])
def test_segments_are_bounded_and_replay_alone(
    path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    queue_policy: str,
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    monkeypatch.setattr(KeptSegments, "folder", folder, raising=False)
    monkeypatch.setattr(journal_module, "SegmentFile", KeptSegments)
    journal = open_file(path, BOUND)

    config = run_config(queue_policy=queue_policy)
    RandomRun(journal, config, seed=1, disturbed_ratio=0.02).run(700)
    journal.close()

    assert total_bytes(path) <= BOUND
    reports = [replay(file) for file in [*folder.iterdir(), path]]
    assert len(reports) >= 3
    assert [report.difference for report in reports] == [None] * len(reports)
    # Nothing was lost in between.
    reports.sort(key=lambda report: report.first_event)
    for before, after in pairwise(reports):
        assert after.first_event == before.first_event + before.num_events


def test_event_is_left_out_when_it_fits_no_segment(path: Path) -> None:
    journal = open_file(path, 60_000)
    recorded = PureFleet(journal=journal)
    recorded.handle(events.RequestSubmitted(a_request(1)))
    too_long = a_request(2)
    too_long.sequence.token_ids = too_long.sequence.token_ids.repeat(5000)
    too_long.sequence.num_prompt_tokens = 15_000

    submitted = journal.record(events.RequestSubmitted(too_long), 0, None)
    submitted.done([], [])  # A checkpoint with the request would not fit either.
    recorded.handle(events.RequestAborted("r1"))
    journal.close()

    assert total_bytes(path) <= 60_000
    before, after = replay(path.with_name(path.name + ".1")), replay(path)
    assert (before.first_event, before.num_events, before.difference) == (1, 1, None)
    assert (after.first_event, after.num_events, after.difference) == (3, 1, None)


# -- what goes wrong ---------------------------------------------------------------------------


def test_recording_ends_and_serving_goes_on_when_the_disk_is_full(
    path: Path,
    journal: FileJournal,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded = PureFleet(journal=journal)
    recorded.join(run_machine())
    recorded.submit(a_request(1, max_tokens=5))
    recorded.settle()

    def fail(_self: SegmentFile, _record: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SegmentFile, "write", fail)
    recorded.run()

    assert not journal.is_recording
    assert not recorded.scheduler.locations
    assert [r.message.split()[0] for r in caplog.records if r.levelno >= logging.ERROR] == [
        "journal_stopped"
    ]
    monkeypatch.undo()
    assert replay(path).difference is None


def test_recording_ends_when_the_disk_fills_within_a_record(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, limits[1]))
    try:
        journal = open_file(path)
        RandomRun(journal, run_config(), seed=1).run(200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert not journal.is_recording
    assert sum(r.message.startswith("journal_stopped") for r in caplog.records) == 1
    assert path.stat().st_size == DISK_BYTES
    report = replay(path)
    assert (report.is_cut, report.difference) == (True, None)


def test_recording_ends_when_a_checkpoint_fills_a_segment(
    path: Path,
) -> None:
    journal = open_file(path, 20_000)
    recorded = PureFleet(journal=journal)
    recorded.join(run_machine())

    for number in range(1, 100):
        recorded.submit(a_request(number))
        recorded.handle(events.RequestAborted(f"r{number}"))

    assert not journal.is_recording
    assert total_bytes(path) <= 20_000
    assert replay(path).difference is None


def test_recording_ends_when_an_event_cannot_be_encoded(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = open_file(path)
    recorded = PureFleet(journal=journal)
    spoiled = a_request(1)
    spoiled.arrival = 2**80

    recorded.handle(events.RequestSubmitted(spoiled))

    assert list(recorded.scheduler.locations) == ["r1"]
    assert not journal.is_recording
    assert [r.message.split()[0] for r in caplog.records] == ["journal_stopped"]


def test_journal_is_none_when_there_is_no_path() -> None:
    assert isinstance(open_journal(None, 2**20), NoJournal)
