"""Tests how requests are found by an id, and what a journal tells of them."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.journal import FileJournal
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values import PolicyConfig, PreemptionMode, Request, SamplingParams
from scheduler_service.watching import (
    MAX_FOUND,
    Life,
    LifeKind,
    LifeRecorder,
    explain,
    find_lives,
    near_ids,
)
from scheduler_service.watching.explain_journal import lives_of
from tests.support.core.machines import NS_PER_S, Machine, RecordedFleet, submission, turns

HEX = "0123456789abcdef0123456789abcdef"


def recorder_of(*names: RequestName) -> LifeRecorder:
    recorder = LifeRecorder(100, lambda: 0)
    for name in names:
        request = Request.create(name.key, [1], SamplingParams(), arrival=1, seed=1)
        recorder.see(submission(request, name))
    return recorder


@pytest.mark.parametrize(
    ("asked", "upstream"),
    [
        ("mine", "mine"),
        (f"chatcmpl-{HEX}", f"{HEX}.0"),
        (f"cmpl-{HEX}", f"{HEX}.12"),
        (f"resp_{HEX}", f"{HEX}.0"),
        (f"req_{HEX}", f"{HEX}.0"),
        (f"req_{HEX}", f"job.7.{HEX}.0"),
        ("chatcmpl-job.7", f"job.7.{HEX}.0"),
        (f"{HEX}.3", f"{HEX}.3"),
        (f"req_{HEX}", f"{HEX}.0~2"),
    ],
)
def test_request_is_found_by_its_own_id_and_the_gateways(asked: str, upstream: str) -> None:
    recorder = recorder_of(RequestName(upstream), RequestName("another"), RequestName("ab.c"))
    assert [life.request_id for life in find_lives(recorder, asked)] == [upstream]


def test_latest_requests_are_found_first_and_not_too_many() -> None:
    tenants = recorder_of(RequestName("r", "a"), RequestName("r", "b"))
    assert [life.key for life in find_lives(tenants, "r")] == ["1:b:r", "1:a:r"]
    many = recorder_of(*(RequestName(f"{HEX}.{index}") for index in range(40)))
    found = find_lives(many, HEX)
    assert len(found) == MAX_FOUND
    assert found[0].request_id == f"{HEX}.39"


def test_similar_ids_are_named_when_there_is_none() -> None:
    recorder = recorder_of(RequestName("request-12"), RequestName("x-quest-12"), RequestName("y"))
    assert find_lives(recorder, "request-13") == []
    assert near_ids(recorder, "request-13") == ["request-12"]
    assert near_ids(recorder, "") == []
    assert near_ids(recorder, "z" * 100_000) == []


@pytest.mark.parametrize(
    ("asked", "upstream"),
    [
        ("job-17", ["job-1735"]),
        (f"req_{HEX[:9]}", [f"{HEX}.1", f"{HEX}.0"]),
        (f"chatcmpl-{HEX[:9]}", [f"{HEX}.1", f"{HEX}.0"]),
        ("batch-9", [f"batch-99.{HEX[::-1]}.0"]),
        ("job-1", []),
        ("job-18", []),
    ],
)
def test_request_is_found_by_a_prefix_that_is_its_own(asked: str, upstream: list[str]) -> None:
    ids = ("job-1735", "job-181", "job-182", f"{HEX}.0", f"{HEX}.1", f"batch-99.{HEX[::-1]}.0")
    recorder = recorder_of(*map(RequestName, ids))
    assert [life.request_id for life in find_lives(recorder, asked)] == upstream


def test_name_of_a_key_is_that_of_its_tenant() -> None:
    for name in (RequestName("r"), RequestName("r", "team"), RequestName("2:ab:r", "ab")):
        assert RequestName.of_key(name.key, name.tenant or "") == name


async def _swaps_and_a_loss(told: RecordedFleet) -> None:
    """Preempts and swaps requests, and loses an executor, of which another takes them."""
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


async def _losses(told: RecordedFleet, num_machines: int) -> None:
    """Loses all executors but the last, one after the other, with the same two requests."""
    machines = [Machine(f"executor:{number}") for number in range(num_machines)]
    await told.fleet.join(machines[0])
    told.fleet.submit(1, 2)
    await turns()
    for machine, following in itertools.pairwise(machines):
        await told.replace(machine, following)
    await told.fleet.finish(machines[-1])


async def _wait_for_an_executor(told: RecordedFleet) -> None:
    first, second = Machine("executor:1"), Machine("executor:2")
    await told.fleet.join(first)
    assert first.link is not None
    first.link.break_off()
    await turns()
    told.fleet.now_ns += 2 * NS_PER_S
    told.fleet.submit(1)
    told.fleet.now_ns += 5 * NS_PER_S
    await told.fleet.join(second)
    await told.fleet.finish(second)


SWAPS = ClusterConfig(policies=PolicyConfig(preemption_mode=PreemptionMode.SWAP))
SUSPICIOUS = ClusterConfig(max_executor_losses=1)


async def _recorded(
    path: Path, config: ClusterConfig, run: Callable[[RecordedFleet], Awaitable[None]]
) -> RecordedFleet:
    journal = FileJournal(path, 2**24)
    told = RecordedFleet(config, journal=journal)
    await run(told)
    await told.close()
    journal.close()
    return told


def _story(life: Life) -> list[tuple[int, LifeKind, str, str, dict[str, int]]]:
    return [(e.at_ns, e.kind, e.executor, e.reason, dict(e.numbers)) for e in life.events]


@pytest.mark.parametrize(
    ("config", "run", "num_lives", "kinds"),
    [
        (
            SWAPS,
            _swaps_and_a_loss,
            4,
            {LifeKind.SWAPPED_OUT, LifeKind.EXECUTOR_LOST, LifeKind.RESUMED},
        ),
        (SUSPICIOUS, partial(_losses, num_machines=2), 2, {LifeKind.ACQUITTED}),
        (SUSPICIOUS, partial(_losses, num_machines=3), 2, {LifeKind.ACQUITTED}),
        (ClusterConfig(), _wait_for_an_executor, 1, {LifeKind.WAITS}),
    ],
    ids=["swaps", "tried alone", "another failed", "no executor"],
)
async def test_journal_tells_what_was_told_when_requests_ran(
    tmp_path: Path,
    config: ClusterConfig,
    run: Callable[[RecordedFleet], Awaitable[None]],
    num_lives: int,
    kinds: set[LifeKind],
) -> None:
    told = await _recorded(tmp_path / "journal", config, run)

    replayed = lives_of(tmp_path / "journal", 10)

    assert (replayed.num_living, len(list(replayed.ended))) == (0, num_lives)
    for life in replayed.ended:
        live = told.life(int(life.request_id[1:]))
        assert _story(life) == _story(live)
        assert life.parts(0) == live.parts(0)
        kinds = kinds - {event.kind for event in life.events}
    assert kinds == set()


async def test_explanation_of_a_journal_is_the_same_each_time(tmp_path: Path) -> None:
    await _recorded(tmp_path / "journal", SWAPS, _swaps_and_a_loss)

    first, second = (explain(lives_of(tmp_path / "journal", 10), "r3") for _ in range(2))

    assert first == second
    (life,) = first.lives
    assert (life.request_id, life.unfinished, life.HasField("began_at")) == ("r3", False, False)
    assert sum(part.duration_us for part in life.parts) == life.duration_us


async def test_later_segment_tells_when_requests_came(
    tmp_path: Path,
) -> None:
    journal = FileJournal(tmp_path / "journal", 110_000)
    told = RecordedFleet(num_kept=20, journal=journal)
    machine = Machine("executor:1")
    told.fleet.now_ns += 2 * NS_PER_S
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
        assert (life.events[0].kind, life.events[0].at_ns) == (LifeKind.RECEIVED, 2 * NS_PER_S)
        assert _story(life)[-1] == _story(told.life(int(life.request_id[1:])))[-1]
