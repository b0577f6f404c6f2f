from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_service.core.blocks.block_pool import BlockPool
from scheduler_service.core.plan import StepEvents, StepOutcome
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.journal.__main__ import main
from scheduler_service.journal.journal import FileJournal
from scheduler_service.journal.replay import Difference, replay
from scheduler_service.journal.segment_file import SegmentReader
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import journal_pb2 as pb
from tests.support.core.in_process import SCHEDULER_EPOCH
from tests.support.core.recorded_run import RandomRun, run_config, write_entries

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of two executors, with all that can happen to them."""
    path = tmp_path_factory.mktemp("journal") / "scheduler.journal"
    journal = FileJournal(path, 2**26, SCHEDULER_EPOCH)
    RandomRun(journal, run_config(queue_policy="priority"), seed=3).run(150)
    journal.close()
    return path


def difference_of(path: Path) -> Difference:
    difference = replay(path).difference
    assert difference is not None
    return difference


def test_replay_is_identical_when_nothing_has_changed(recorded: Path) -> None:
    report = replay(recorded)

    events = [entry.WhichOneof("event") for entry in SegmentReader(recorded)]
    assert set(events) >= {"add", "readmit", "abort", "evacuate", "schedule", "apply", "take_ended"}
    assert report.difference is None
    assert (report.first_event, report.num_events) == (1, len(events) - 1)
    assert report.num_steps == events.count("apply")
    assert not report.is_cut


def test_replay_is_identical_when_another_process_hashes_otherwise(recorded: Path) -> None:
    for seed in ("1", "2"):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")]),
        }
        command = [sys.executable, "-m", "scheduler_service.journal", str(recorded)]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.endswith("identical\n")


# -- a core that has changed -------------------------------------------------------------------


def reuses_blocks_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(pool: BlockPool, block_ids: list[int]) -> None:
        original(pool, block_ids[::-1])

    original = BlockPool.free
    monkeypatch.setattr(BlockPool, "free", free)


def forgets_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    alter_events(monkeypatch, lambda events: setattr(events, "finished", []))


def sends_tokens_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    alter_events(monkeypatch, lambda events: setattr(events, "client_keys", events.client_keys + 1))


def alter_events(monkeypatch: pytest.MonkeyPatch, alter: Callable[[StepEvents], None]) -> None:
    def apply(core: Scheduler, outcome: StepOutcome) -> StepEvents:
        events = original(core, outcome)
        alter(events)
        return events

    original = Scheduler.apply
    monkeypatch.setattr(Scheduler, "apply", apply)


def aborts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "abort", lambda _core, _request_id: None)


def breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(core: Scheduler) -> None:
        raise AssertionError("it is broken")

    monkeypatch.setattr(Scheduler, "schedule", schedule)


def loses_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def evacuate(core: Scheduler) -> list[Request]:
        return original(core)[1:]

    original = Scheduler.evacuate
    monkeypatch.setattr(Scheduler, "evacuate", evacuate)


def remembers_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def evacuate(core: Scheduler) -> list[Request]:
        moved = original(core)
        for request in moved:
            request.num_bypasses += 1
        return moved

    original = Scheduler.evacuate
    monkeypatch.setattr(Scheduler, "evacuate", evacuate)


@pytest.mark.parametrize(
    ("change", "call", "field"),
    [
        (reuses_blocks_in_another_order, "schedule", "schedule.batch."),
        (forgets_an_end, "apply", "apply.events.finished"),
        (sends_tokens_to_others, "apply", "apply.events.tokens_crc32"),
        (aborts_nobody, "abort", "abort.found"),
        (breaks, "schedule", "raised"),
        (loses_a_request, "evacuate", "evacuate.requests"),
        (remembers_too_much, "evacuate", "evacuate.requests[0].state_crc32"),
    ],
)
def test_replay_names_the_first_field_when_a_decision_is_another(
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    call: str,
    field: str,
) -> None:
    change(monkeypatch)

    difference = difference_of(recorded)

    assert difference.call == call
    assert difference.field.field.startswith(field)
    assert difference.field.recorded != difference.field.replayed
    assert difference.address.startswith("executor:")


# -- files -------------------------------------------------------------------------------------


def rewritten(path: Path, tmp_path: Path, change: Callable[[pb.JournalEntry], None]) -> Path:
    """A copy of a journal with every entry changed."""
    copy = tmp_path / "copy.journal"
    entries = list(SegmentReader(path))
    for entry in entries:
        change(entry)
    write_entries(copy, entries)
    return copy


def test_replay_takes_complete_entries_when_the_file_was_cut(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cut.journal"
    path.write_bytes(recorded.read_bytes()[:-3])

    assert main([str(path)]) == 0

    num_events = replay(recorded).num_events - 1
    output = capsys.readouterr().out
    assert f"{num_events} events were complete" in output
    assert output.endswith("identical\n")


def test_main_shows_both_values_when_a_decision_is_another(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(entry: pb.JournalEntry) -> None:
        if entry.HasField("schedule") and entry.schedule.HasField("batch"):
            batch = executor.ScheduleBatch.FromString(entry.schedule.batch)
            batch.scheduler_epoch += batch.step_id == 5
            entry.schedule.batch = batch.SerializeToString()

    assert main([str(rewritten(recorded, tmp_path, change))]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert "step 5, schedule.batch.scheduler_epoch" in lines[1]
    assert lines[2:] == [
        f"  recorded: {SCHEDULER_EPOCH + 1}",
        f"  replayed: {SCHEDULER_EPOCH}",
    ]


def newer(entry: pb.JournalEntry) -> None:
    if entry.HasField("header"):
        entry.header.journal_version = 3


def of_another_core(entry: pb.JournalEntry) -> None:
    entry.core += entry.HasField("schedule") and 50


def with_another_policy(entry: pb.JournalEntry) -> None:
    if entry.HasField("core_created"):
        entry.core_created.config.queue_policy = "luck"


def with_a_result_that_is_none(entry: pb.JournalEntry) -> None:
    if entry.HasField("apply"):
        entry.apply.result = b"\xff"


def headless(entry: pb.JournalEntry) -> None:
    if entry.HasField("header"):
        entry.ClearField("header")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (newer, "journal_version is 3; this software reads 2"),
        (of_another_core, "was never created"),
        (with_another_policy, "queue_policy is 'luck'"),
        (with_a_result_that_is_none, "Error parsing message"),
        (headless, "does not begin as a journal does"),
    ],
)
def test_main_says_why_when_the_file_cannot_be_read(
    recorded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[pb.JournalEntry], None],
    message: str,
) -> None:
    assert main([str(rewritten(recorded, tmp_path, change))]) == 2

    assert message in capsys.readouterr().err
