"""A journal tells of requests what was told while it was written."""

from __future__ import annotations

import itertools
from pathlib import Path

from scheduler_service.config import ClusterConfig
from scheduler_service.journal.journal import FileJournal
from scheduler_service.scheduler.values.config import PolicyConfig, PreemptionMode
from scheduler_service.watching.explain_journal import lives_of
from scheduler_service.watching.explanation import explain
from scheduler_service.watching.life import Life, LifeKind, Part, Phase
from scheduler_service.watching.life_recorder import NO_EXECUTOR
from tests.support.core.machines import Machine
from tests.support.core.stepped_fleet import turns
from tests.support.core.told_fleet import S, ToldFleet


async def _recorded_run(path: Path) -> ToldFleet:
    """Preemptions, swaps, and an executor that is lost, of which another takes the requests."""
    journal = FileJournal(path, 2**24)
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


def _story(life: Life) -> list[tuple[int, LifeKind, str, str, dict[str, int]]]:
    return [(e.at_ns, e.kind, e.executor, e.reason, dict(e.numbers)) for e in life.events]


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
        assert life.parts(0) == live.parts(0)
        kinds |= {event.kind for event in life.events}
    assert {LifeKind.SWAPPED_OUT, LifeKind.EXECUTOR_LOST, LifeKind.RESUMED} <= kinds


async def test_explanation_of_a_journal_is_the_same_each_time(tmp_path: Path) -> None:
    await _recorded_run(tmp_path / "journal")

    first, second = (explain(lives_of(tmp_path / "journal", 10), "r3") for _ in range(2))

    assert first == second
    (life,) = first.lives
    assert (life.request_id, life.unfinished, life.HasField("began_at")) == ("r3", False, False)
    assert sum(part.duration_us for part in life.parts) == life.duration_us


async def test_journal_tells_who_was_tried_alone_when_executors_died_of_it(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "journal", 2**24)
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
        assert _story(life) == _story(told.life(int(life.request_id[1:])))
        assert [e.kind for e in life.events[-2:]] == [LifeKind.ACQUITTED, LifeKind.ENDED]


async def test_journal_tells_who_was_acquitted_when_another_request_had_failed(
    tmp_path: Path,
) -> None:
    journal = FileJournal(tmp_path / "journal", 2**24)
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


async def test_journal_tells_what_a_request_waited_for_when_no_executor_was_there(
    tmp_path: Path,
) -> None:
    journal = FileJournal(tmp_path / "journal", 2**24)
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
    assert _story(life) == _story(told.life(1))
    assert life.events[0].kind is LifeKind.RECEIVED
    assert life.events[0].at_ns == 2 * S
    assert life.parts(0)[Part(Phase.QUEUED, NO_EXECUTOR)] == 5 * S


async def test_journal_tells_when_requests_came_when_the_segment_is_not_the_first(
    tmp_path: Path,
) -> None:
    journal = FileJournal(tmp_path / "journal", 110_000)
    told = ToldFleet(num_kept=20, journal=journal)
    machine = Machine("executor:1")
    told.fleet.now_ns += 2 * S
    await told.fleet.join(machine)
    for handle in range(1, 15):
        told.submit_long(handle, 10, 80)
    await turns()
    for _ in range(1300):
        await told.release(machine)
    await told.close()
    journal.close()
    assert (tmp_path / "journal.1").exists()

    lives = list(lives_of(tmp_path / "journal", 20).ended)
    assert 0 < len(lives) < 14
    for life in lives:
        assert (life.events[0].kind, life.events[0].at_ns) == (LifeKind.RECEIVED, 2 * S)
        assert _story(life)[-1] == _story(told.life(int(life.request_id[1:])))[-1]
