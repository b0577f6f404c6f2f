"""A journal tells of requests what was told while it was written."""

from __future__ import annotations

import itertools
from pathlib import Path

from scheduler_service.config import ClusterConfig
from scheduler_service.core.config import PolicyConfig, PreemptionMode
from scheduler_service.journal.journal import FileJournal
from scheduler_service.request_lives.explanation import explain
from scheduler_service.request_lives.from_journal import lives_of
from scheduler_service.request_lives.life import Life
from scheduler_service.request_lives.life_event import LifeEvent, LifeKind, Part, Phase
from tests.support.core.machines import Machine
from tests.support.core.stepped_fleet import turns
from tests.support.core.told_fleet import S, ToldFleet

# What the queue of all executors knows, and no core.
_OF_THE_QUEUE = frozenset({LifeKind.RECEIVED, LifeKind.WAITS})
_KNOWN_TO_CORES = frozenset({"tried_alone"})


async def _recorded_run(path: Path) -> ToldFleet:
    """Preemptions, swaps, and an executor that is lost, of which another takes the requests."""
    journal = FileJournal(path, 2**24, 1)
    policies = PolicyConfig(preemption_mode=PreemptionMode.SWAP)
    told = ToldFleet(ClusterConfig(policies=policies), journal=journal)
    first, second = (Machine(f"executor:{n}", num_host_blocks=20) for n in (1, 2))
    await told.fleet.join(first)
    for handle in (1, 2, 3, 4):
        told.submit_long(handle, 20, 30)
    await turns()
    for _ in range(30):
        await told.release(first)
    await told.fleet.join(second)
    assert first.link is not None
    first.link.break_off()
    await turns()
    for _ in range(200):
        await told.release(second)
    await told.close()
    journal.close()
    return told


def _story(life: Life) -> list[tuple[int, str, str, str]]:
    return [
        (event.at_ns, event.kind.value, event.executor, _reason(event))
        for event in life.events
        if event.kind not in _OF_THE_QUEUE
    ]


def _reason(event: LifeEvent) -> str:
    """Without what the router compared, of which no core is told."""
    if event.kind is LifeKind.GIVEN and event.reason not in _KNOWN_TO_CORES:
        return ""
    return event.reason


async def test_journal_tells_the_same_of_requests_as_was_told_when_they_ran(
    tmp_path: Path,
) -> None:
    told = await _recorded_run(tmp_path / "journal")

    replayed = lives_of(tmp_path / "journal", 10)

    assert replayed.num_living == 0
    assert {life.request_id for life in replayed.ended} == {"r1", "r2", "r3", "r4"}
    kinds = set()
    for life in replayed.ended:
        live = told.life(int(life.request_id[1:]))
        assert _story(life) == _story(live)
        for phase in (Phase.PROMPT, Phase.TOKENS, Phase.SWAPPED):
            spent = [
                sum(ns for part, ns in each.parts(0).items() if part.phase is phase)
                for each in (life, live)
            ]
            assert spent[0] == spent[1]
        kinds |= {event.kind for event in life.events}
    assert {LifeKind.SWAPPED_OUT, LifeKind.EXECUTOR_LOST, LifeKind.RESUMED} <= kinds


async def test_explanation_of_a_journal_is_the_same_each_time(tmp_path: Path) -> None:
    await _recorded_run(tmp_path / "journal")

    first, second = (explain(lives_of(tmp_path / "journal", 10), "r3") for _ in range(2))

    assert first == second
    (life,) = first.lives
    assert (life.request_id, life.unfinished, life.HasField("began_at")) == ("r3", False, False)
    assert sum(part.duration_us for part in life.parts) == life.duration_us


async def test_journal_tells_why_a_request_waits_at_an_executor_as_it_was_told(
    tmp_path: Path,
) -> None:
    told = await _recorded_run(tmp_path / "journal")

    told_of = {_waits(life) for life in told.recorder.ended}
    assert {_waits(life) for life in lives_of(tmp_path / "journal", 10).ended} == told_of
    assert {reason for waits in told_of for _, reason, _ in waits} >= {"blocks"}


def _waits(life: Life) -> tuple[tuple[int, str, str], ...]:
    """For what an executor lacks that has it."""
    has_it, waits = "", []
    for event in life.events:
        if event.kind is LifeKind.GIVEN:
            has_it = event.executor
        elif event.kind in (LifeKind.EXECUTOR_LOST, LifeKind.TAKEN_BACK):
            has_it = ""
        elif event.kind is LifeKind.WAITS and has_it:
            waits.append((event.at_ns, event.reason, event.executor))
    return tuple(waits)


async def test_journal_tells_who_was_tried_alone_when_executors_died_of_it(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "journal", 2**24, 1)
    told = ToldFleet(ClusterConfig(max_executor_losses=1), journal=journal)
    first, second = Machine("executor:1"), Machine("executor:2")
    await told.fleet.join(first)
    told.fleet.submit(1, 2)
    await turns()
    await told.replace(first, second)
    await told.fleet.finish(second)
    await told.close()
    journal.close()

    replayed = list(lives_of(tmp_path / "journal", 10).ended)
    assert len(replayed) == 2
    for life in replayed:
        told_kinds = [kind for kind in told.kinds(int(life.request_id[1:])) if kind != "waits"]
        assert [event.kind.value for event in life.events] == told_kinds
        assert told_kinds[-2:] == ["acquitted", "ended"]


async def test_journal_tells_who_was_acquitted_when_another_request_had_failed(
    tmp_path: Path,
) -> None:
    journal = FileJournal(tmp_path / "journal", 2**24, 1)
    told = ToldFleet(ClusterConfig(max_executor_losses=1), journal=journal)
    machines = [Machine(f"executor:{number}") for number in (1, 2, 3)]
    await told.fleet.join(machines[0])
    told.fleet.submit(1, 2)
    await turns()
    for machine, following in itertools.pairwise(machines):
        await told.replace(machine, following)
    await told.fleet.finish(machines[-1])
    await told.close()
    journal.close()

    replayed = {life.request_id: life for life in lives_of(tmp_path / "journal", 10).ended}
    acquitted = [e for e in replayed["r2"].events if e.kind is LifeKind.ACQUITTED]
    assert [event.reason for event in acquitted] == ["another_failed"]
    assert [e.kind for e in replayed["r2"].events[-1:]] == [LifeKind.ENDED]


async def test_journal_tells_how_long_a_request_waited_for_an_executor_and_not_for_what(
    tmp_path: Path,
) -> None:
    journal = FileJournal(tmp_path / "journal", 2**24, 1)
    told = ToldFleet(journal=journal)
    first, second = Machine("executor:1"), Machine("executor:2")
    await told.fleet.join(first)
    assert first.link is not None
    first.link.break_off()
    await turns()
    told.fleet.now_ns += 2 * S
    told.fleet.submit(1)
    told.fleet.now_ns += 5 * S
    await told.fleet.join(second)
    await told.fleet.finish(second)
    await told.close()
    journal.close()

    (life,) = lives_of(tmp_path / "journal", 10).ended
    assert life.events[0].kind is LifeKind.RECEIVED
    assert life.events[0].at_ns == told.life(1).events[0].at_ns == 2 * S
    assert "num_waiting" not in life.events[0].numbers
    assert life.parts(0)[Part(Phase.QUEUED, "not_recorded")] == 5 * S
