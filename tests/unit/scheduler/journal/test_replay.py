"""Tests replaying a journal, and what is said of differences."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_service.journal import Difference, SegmentReader, find_difference, replay
from scheduler_service.journal.__main__ import main
from scheduler_service.scheduler import Effect, Event, ExecutorState, Scheduler
from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.engine.blocks import BlockPool
from scheduler_service.scheduler.queue import Waiting
from scheduler_service.scheduler.values import Request, StepEvents, StepOutcome
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import journal_pb2 as pb
from tests.support.core.in_process import SCHEDULER_EPOCH
from tests.support.core.machines import Fleet, Machine, turns
from tests.support.core.pure_fleet import PureFleet, a_request
from tests.support.core.recorded_run import (
    RandomRun,
    open_file,
    run_config,
    run_machine,
    write_entries,
)

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of two executors, and of much that can happen to them."""
    return record(tmp_path_factory.mktemp("journal") / "scheduler.journal", seed=5)


def record(path: Path, seed: int) -> Path:
    """Records two executors in `path`."""
    journal = open_file(path)
    RandomRun(journal, run_config(queue_policy="priority"), seed=seed).run(150)
    journal.close()
    return path


def difference_of(path: Path) -> Difference:
    difference = replay(path).difference
    assert difference is not None
    return difference


def test_replay_is_identical_when_nothing_has_changed(tmp_path: Path) -> None:
    path = record(tmp_path / "everything.journal", seed=8)
    report = replay(path)

    entries = list(SegmentReader(path))
    events = [entry.WhichOneof("event") for entry in entries]
    effects = {effect.WhichOneof("effect") for entry in entries for effect in entry.effects}
    # The next test has parts for certain.
    assert set(events) | {"step_progressed"} == names_in("event") - {"scheduler_checkpoint"}
    assert effects == names_in("effect") - {"engine_failed"}
    assert report.difference is None
    assert (report.first_event, report.num_events) == (1, len(events) - 2)
    assert report.num_steps == events.count("step_completed")
    assert not report.is_cut


def test_replay_is_identical_when_parts_came_before_results(tmp_path: Path) -> None:
    path = tmp_path / "parts.journal"
    journal = open_file(path)
    machine = run_machine(run_config(max_run_ahead=8))
    fleet = PureFleet(journal=journal)
    fleet.join(machine)
    fleet.submit(a_request(1, max_tokens=40, ignore_eos=True))
    for _ in range(20):
        fleet.settle()
        fleet.now_ns += 10**6
        if fleet.held[machine.address]:
            fleet.report(machine)
            fleet.answer(machine)
    journal.close()

    events = [entry.WhichOneof("event") for entry in SegmentReader(path)]

    assert events.count("step_progressed") > 1
    assert replay(path).difference is None


def names_in(oneof: str) -> set[str]:
    """Names of all events or effects that a journal can have."""
    message = pb.JournalEntry if oneof == "event" else pb.JournaledEffect
    return {field.name for field in message.DESCRIPTOR.oneofs_by_name[oneof].fields}


def test_replay_is_identical_when_another_process_hashes_otherwise(recorded: Path) -> None:
    for seed in ("1", "2"):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in (".", "common", "protos")),
        }
        command = [sys.executable, "-m", "scheduler_service.journal", str(recorded)]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.endswith("identical\n")


# -- a scheduler that has changed --------------------------------------------------------------


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
    def apply(engine: Engine, outcome: StepOutcome) -> StepEvents:
        events = original(engine, outcome)
        alter(events)
        return events

    original = Engine.apply
    monkeypatch.setattr(Engine, "apply", apply)


def aborts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "abort", lambda _engine, _request_id: None)


def breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_step(_engine: Engine, _waiting: Waiting) -> None:
        raise AssertionError("it is broken")

    monkeypatch.setattr(Engine, "plan_step", plan_step)


def raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(_scheduler: Scheduler, _event: Event, _now_ns: int) -> list[Effect]:
        raise AssertionError("it is broken")

    monkeypatch.setattr(Scheduler, "handle", handle)


def loses_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    alter_evacuated(monkeypatch, lambda moved: moved.pop() if moved else None)


def remembers_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def alter(moved: list[Request]) -> None:
        for request in moved:
            request.num_bypasses += 1

    alter_evacuated(monkeypatch, alter)


def alter_evacuated(
    monkeypatch: pytest.MonkeyPatch, alter: Callable[[list[Request]], object]
) -> None:
    def evacuate(engine: Engine) -> list[Request]:
        moved = original(engine)
        alter(moved)
        return moved

    original = Engine.evacuate
    monkeypatch.setattr(Engine, "evacuate", evacuate)


def prefers_the_last_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    def taking_requests(scheduler: Scheduler) -> list[ExecutorState]:
        return [each for each in scheduler.executors.values() if each.takes_requests][::-1]

    monkeypatch.setattr(Scheduler, "taking_requests", property(taking_requests))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (reuses_blocks_in_another_order, "send_step.batch."),
        (forgets_an_end, "deliver_tokens.finished"),
        (sends_tokens_to_others, "deliver_tokens.tokens_crc32"),
        (aborts_nobody, "deliver_tokens"),
        (breaks, "engine_failed"),
        (raises, "raised"),
        (loses_a_request, "executor_gone.requests"),
        (remembers_too_much, "executor_gone.requests[0].state_crc32"),
        (prefers_the_last_executor, "request_assigned."),
    ],
)
def test_replay_names_the_first_field_when_a_decision_is_another(
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    field: str,
) -> None:
    change(monkeypatch)

    difference = difference_of(recorded)

    assert re.sub(r"^effects\[\d+\]\.", "", difference.field.field).startswith(field)
    assert difference.field.recorded != difference.field.replayed
    assert bool(difference.address) == (change is not aborts_nobody)


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
        for step in (each.send_step for each in entry.effects if each.HasField("send_step")):
            batch = executor.ScheduleBatch.FromString(step.batch)
            batch.scheduler_epoch += batch.step_id == 5
            step.batch = batch.SerializeToString()

    assert main([str(rewritten(recorded, tmp_path, change))]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert re.search(
        r"executor executor:\d, step 5, effects\[\d\]\.send_step\.batch\.scheduler_epoch", lines[1]
    )
    assert lines[2:] == [
        f"  recorded: {SCHEDULER_EPOCH + 1}",
        f"  replayed: {SCHEDULER_EPOCH}",
    ]


def newer(entry: pb.JournalEntry) -> None:
    if entry.HasField("header"):
        entry.header.journal_version = 4


def without_a_scheduler(entry: pb.JournalEntry) -> None:
    if entry.HasField("scheduler_created"):
        entry.tick.SetInParent()


def without_an_event(entry: pb.JournalEntry) -> None:
    if entry.HasField("tick"):
        entry.ClearField("tick")


def with_another_policy(entry: pb.JournalEntry) -> None:
    if entry.HasField("scheduler_created"):
        entry.scheduler_created.config.queue_policy = "luck"


def with_a_result_that_is_none(entry: pb.JournalEntry) -> None:
    if entry.HasField("step_completed"):
        entry.step_completed.result = b"\xff"


def headless(entry: pb.JournalEntry) -> None:
    if entry.HasField("header"):
        entry.ClearField("header")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (newer, "journal_version is 4; this software reads 3"),
        (without_a_scheduler, "the first event is tick"),
        (without_an_event, "None is not an event of a scheduler"),
        (with_another_policy, "queue_policy is 'luck'"),
        (with_a_result_that_is_none, "Error parsing message"),
        (headless, "the first entry is not a header"),
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


def test_difference_tells_element_and_both_values_when_a_column_differs() -> None:
    ours = executor.ScheduleBatch(step_id=4, work=executor.Work(row_ids=b"\1\0\0\0\5\0\0\0"))
    theirs = executor.ScheduleBatch(step_id=4, work=executor.Work(row_ids=b"\1\0\0\0\7\0\0\0"))
    recorded, replayed = (
        pb.JournaledEffect(send_step=pb.SendStep(batch=batch.SerializeToString()))
        for batch in (ours, theirs)
    )

    difference = find_difference(recorded, replayed)

    assert difference is not None
    assert difference.field == "send_step.batch.work.row_ids[1]"
    assert (difference.recorded, difference.replayed) == ("5", "7")


def test_difference_tells_lengths_of_columns() -> None:
    ours = executor.Work(row_ids=b"\1\0\0\0")
    theirs = executor.Work(row_ids=b"\1\0\0\0\7\0\0\0")

    difference = find_difference(ours, theirs)

    assert difference is not None
    assert (difference.field, difference.recorded) == ("row_ids", "1 elements")


def test_batches_are_equal_when_only_the_order_of_a_map_differs() -> None:
    # Two encodings of {1: 1.0, 2: 2.0}.
    first, second = b"\x42\x07\x08\x01\x15\0\0\x80\x3f", b"\x42\x07\x08\x02\x15\0\0\0\x40"
    messages = []
    for params in (first + second, second + first):
        rows = executor.NewRows(sampling_params=[executor.SamplingParams.FromString(params)])
        messages.append(executor.ScheduleBatch(new_rows=rows))
    assert dict(messages[0].new_rows.sampling_params[0].logit_bias) == {1: 1.0, 2: 2.0}

    assert find_difference(messages[0], messages[1]) is None


async def test_effects_are_recorded_when_the_driver_fails_to_execute_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[object] = []

    def fail(events: object) -> None:
        monkeypatch.undo()
        failed.append(events)
        raise RuntimeError("a fault of the driver")

    journal = open_file(path)
    fleet = Fleet(journal=journal)
    machine = Machine("executor:1")
    await fleet.join(machine)
    monkeypatch.setattr(fleet.cluster.delivery, "deliver", fail)
    fleet.submit(1)
    await turns()
    await fleet.finish(machine)
    await fleet.cluster.drain(0)
    journal.close()

    entries = list(SegmentReader(path))
    delivered = [
        effect for entry in entries for effect in entry.effects if effect.HasField("deliver_tokens")
    ]
    assert len(failed) == 1
    assert delivered
    assert replay(path).difference is None
