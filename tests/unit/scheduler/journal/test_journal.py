from __future__ import annotations

import logging
import resource
from itertools import pairwise
from pathlib import Path

import pytest

from scheduler_service.journal import journal as journal_module
from scheduler_service.journal.core import look_into
from scheduler_service.journal.journal import NoJournal, open_journal
from scheduler_service.journal.replay import replay
from scheduler_service.journal.segment_file import SegmentFile
from splitserve_rpc.domain_error import DomainError
from tests.support.core.driver import make_config
from tests.support.core.pure_fleet import a_request
from tests.support.core.recorded_run import RandomRun, RecordedEngine, open_file, run_config

BOUND = 400_000
DISK_BYTES = 70_001


def total_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.iterdir())


class KeptSegments(SegmentFile):
    """Copies each segment when it ends."""

    folder: Path

    def rotate(self) -> None:
        self.flush()
        number = len(list(self.folder.iterdir()))
        (self.folder / f"{number}.journal").write_bytes(self._path.read_bytes())
        super().rotate()
        assert total_bytes(self._path) <= BOUND


@pytest.mark.parametrize("queue_policy", ["fcfs", "deadline"])
def test_segments_stay_within_the_bound_and_replay_alone_when_the_file_rotates(
    path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    queue_policy: str,
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    monkeypatch.setattr(KeptSegments, "folder", folder, raising=False)
    monkeypatch.setattr(journal_module, "SegmentFile", KeptSegments)
    journal = open_file(path, BOUND)

    RandomRun(journal, run_config(queue_policy=queue_policy), seed=1).run(600)
    journal.close()

    assert total_bytes(path) <= BOUND
    reports = [replay(file) for file in [*folder.iterdir(), path]]
    assert len(reports) >= 4
    assert [report.difference for report in reports] == [None] * len(reports)
    # Nothing was lost in between.
    reports.sort(key=lambda report: report.first_event)
    for before, after in pairwise(reports):
        assert after.first_event == before.first_event + before.num_events


def test_event_is_left_out_when_it_fits_no_segment(path: Path) -> None:
    journal = open_file(path, 60_000)
    core = journal.core(make_config(), 0, "a:1", 1)
    core.add(a_request(1))
    too_long = a_request(2)
    too_long.sequence.token_ids = too_long.sequence.token_ids.repeat(5000)
    too_long.sequence.num_prompt_tokens = 15_000

    with pytest.raises(DomainError):
        core.add(too_long)
    core.abort("r1")
    journal.close()

    assert total_bytes(path) <= 60_000
    before, after = replay(path.with_name(path.name + ".1")), replay(path)
    assert (before.first_event, before.num_events, before.difference) == (1, 2, None)
    assert (after.first_event, after.num_events, after.difference) == (4, 1, None)


def test_recording_ends_and_serving_goes_on_when_the_disk_is_full(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = open_file(path)
    engine = RecordedEngine(journal, run_config())
    engine.core.add(a_request(1, max_tokens=5))
    engine.fill()

    def fail(_self: SegmentFile, _record: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SegmentFile, "write", fail)
    while engine.fill():
        engine.answer()

    assert not journal.is_recording
    assert look_into(engine.core).num_running == 0
    assert [r.message.split()[0] for r in caplog.records if r.levelno >= logging.ERROR] == [
        "journal_stopped"
    ]
    monkeypatch.undo()
    assert replay(path).difference is None


def test_recording_ends_and_serving_goes_on_when_the_disk_is_full_in_the_middle_of_a_record(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, limits[1]))
    try:
        journal = open_file(path)
        RandomRun(journal, run_config(), seed=1).run(400)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert not journal.is_recording
    assert sum(r.message.startswith("journal_stopped") for r in caplog.records) == 1
    assert path.stat().st_size == DISK_BYTES
    report = replay(path)
    assert (report.is_cut, report.difference) == (True, None)


def test_recording_ends_when_the_state_of_the_cores_takes_most_of_a_segment(path: Path) -> None:
    journal = open_file(path, 20_000)
    core = journal.core(make_config(vocab_size=15_000), 0, "a:1", 1)

    for number in range(1, 100):
        core.add(a_request(number))
        core.abort(f"r{number}")
        core.take_ended()

    assert not journal.is_recording
    assert total_bytes(path) <= 20_000
    assert replay(path).difference is None


def test_journal_is_none_when_there_is_no_path() -> None:
    assert isinstance(open_journal(None, 2**20, 1), NoJournal)
