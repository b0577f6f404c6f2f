from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from scheduler_service.core.scheduler import Scheduler
from scheduler_service.journal.core import look_into
from scheduler_service.journal.journal import Journal, NoJournal
from scheduler_service.journal.journaled_core import JournaledCore
from scheduler_service.journal.replay import replay
from scheduler_service.journal.segment_file import SegmentReader
from splitserve_rpc.domain_error import DomainError
from tests.support.core.driver import make_config
from tests.support.core.pure_fleet import a_request
from tests.support.core.recorded_run import open_file


def kinds(path: Path) -> Counter[str | None]:
    return Counter(entry.WhichOneof("event") for entry in SegmentReader(path))


@pytest.mark.parametrize("is_recorded", [True, False])
def test_core_goes_on_from_the_last_step_when_the_executor_lives_on(
    path: Path, is_recorded: bool
) -> None:
    journal: Journal = open_file(path) if is_recorded else NoJournal()

    core = journal.core(make_config(), 41, "a:1", 1)

    core.add(a_request(1))
    assert isinstance(core, JournaledCore) == is_recorded
    assert look_into(core).last_step_id == 41
    plan = core.schedule()
    assert plan is not None
    assert plan.step_id == 42
    journal.close()


def test_journaled_core_takes_every_call_that_changes_a_core_when_one_grows() -> None:
    questions = {"check", "checked", "find", "fits", "has_place", "move_ns", "num_cached_tokens"}
    questions |= {"oldest_rows", "recompute_ns"}
    calls = {
        name
        for name, member in vars(Scheduler).items()
        if callable(member) and not name.startswith("_")
    }

    assert calls - questions <= vars(JournaledCore).keys()


def test_entry_has_the_reason_when_a_request_is_refused(path: Path) -> None:
    journal = open_file(path)
    core = journal.core(make_config(max_num_waiting=1), 0, "a:1", 1)
    core.add(a_request(1))

    with pytest.raises(DomainError):
        core.add(a_request(2))
    journal.close()

    assert [entry.raised for entry in SegmentReader(path)][-2:] == ["", "DomainError QUEUE_FULL"]
    assert replay(path).difference is None


def test_entry_is_on_disk_when_a_call_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_file(path)
    core = journal.core(make_config(), 0, "a:1", 1)
    core.add(a_request(1))

    def fail(_self: Scheduler) -> None:
        raise AssertionError("block 3 freed twice")

    monkeypatch.setattr(Scheduler, "schedule", fail)
    with pytest.raises(AssertionError):
        core.schedule()

    assert list(SegmentReader(path))[-1].raised == "AssertionError"
    assert journal.position == f"{path}#3"
    assert replay(path).difference is None
    monkeypatch.undo()
    difference = replay(path).difference
    assert difference is not None
    assert (difference.event, difference.field.field) == (3, "raised")
    journal.close()


def test_events_are_on_disk_when_the_core_is_idle(path: Path) -> None:
    journal = open_file(path)
    core = journal.core(make_config(), 0, "a:1", 1)
    core.tick(5)

    core.schedule()

    assert kinds(path) == {"header": 1, "core_created": 1, "schedule": 1}
    journal.close()


def test_clock_is_written_once_when_it_stands_still(path: Path) -> None:
    journal = open_file(path)
    core = journal.core(make_config(), 0, "a:1", 1)
    for now_ns in (0, 0, 7, 7):
        core.tick(now_ns)
        core.abort("nobody")
    journal.close()

    entries = [entry for entry in SegmentReader(path) if entry.HasField("abort")]
    clocks = [entry.now_ns if entry.HasField("now_ns") else None for entry in entries]
    assert clocks == [0, None, 7, None]


def test_nothing_is_recorded_when_a_core_was_evacuated(path: Path) -> None:
    journal = open_file(path)
    core = journal.core(make_config(), 0, "a:1", 1)
    core.add(a_request(1))

    assert [request.request_id for request in core.evacuate()] == ["r1"]
    with pytest.raises(RuntimeError, match="given its requests away"):
        core.abort("r1")
    journal.close()

    assert kinds(path) == {"header": 1, "core_created": 1, "add": 1, "evacuate": 1}
