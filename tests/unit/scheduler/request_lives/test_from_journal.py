"""A journal tells of requests what was told while it was written."""

from __future__ import annotations

from pathlib import Path

from scheduler_service.config import ClusterConfig
from scheduler_service.core.config import PolicyConfig, PreemptionMode
from scheduler_service.journal.journal import FileJournal
from scheduler_service.request_lives.explanation import explain
from scheduler_service.request_lives.from_journal import lives_of
from scheduler_service.request_lives.life import Life
from scheduler_service.request_lives.life_event import LifeKind, Phase
from tests.support.core.machines import Machine
from tests.support.core.stepped_fleet import turns
from tests.support.core.told_fleet import ToldFleet

# What the queue of all executors knows, and no core.
_OF_THE_QUEUE = frozenset({LifeKind.RECEIVED, LifeKind.WAITS})


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
        (event.at_ns, event.kind.value, event.executor, event.reason)
        for event in life.events
        if event.kind not in _OF_THE_QUEUE
    ]


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
