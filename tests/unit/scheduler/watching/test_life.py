"""Tests what is recorded of the lives of requests."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.callers import Caller, Scope
from scheduler_service.config import ClusterConfig
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values import (
    BlockMoves,
    Drafts,
    NewRow,
    PolicyConfig,
    PreemptionMode,
    Request,
    RowWork,
    SamplingParams,
    StepOutcome,
    StepPart,
    StepPlan,
    StepStatus,
    TableWrites,
)
from scheduler_service.service import RequestLog
from scheduler_service.watching import (
    BoundedLives,
    Life,
    LifeEvent,
    LifeKind,
    PhaseSpan,
    RequestPhase,
    StepRows,
)
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import DomainError
from tests.support.core.machines import NS_PER_S, Machine, RecordedFleet, submission, turns


async def test_life_has_events_and_times_of_a_request() -> None:
    told, machine = RecordedFleet(), Machine("executor:1")
    await told.fleet.join(machine)

    told.fleet.submit(1)
    await turns()
    await told.release(machine, 2)
    await told.fleet.finish(machine)

    life = told.life(1)
    assert told.kinds(1) == ["received", "assigned", "began", "first_token", "ended"]
    assert [event.at_ns for event in life.events] == [0, 0, 0, 2 * NS_PER_S, 2 * NS_PER_S]
    assert told.event(1, LifeKind.RECEIVED).numbers == {"num_waiting": 0, "num_prompt_tokens": 1}
    assert told.event(1, LifeKind.BEGAN).numbers == {"num_tokens": 1, "num_cached": 0}
    first = told.event(1, LifeKind.FIRST_TOKEN)
    assert (first.executor, first.numbers["num_chunks"]) == ("executor:1", 1)
    end = told.event(1, LifeKind.ENDED)
    assert (end.reason, end.numbers["num_output_tokens"]) == ("length", 5)
    assert life.parts(99 * NS_PER_S) == {
        PhaseSpan(RequestPhase.PROMPT, "", "executor:1"): 2 * NS_PER_S
    }
    await told.close()


async def test_life_says_why_a_request_waits() -> None:
    told, machine = RecordedFleet(), Machine("executor:1")
    await told.fleet.join(machine)
    told.fleet.submit(1, 2, 3, 4)
    await turns()
    assert machine.link is not None
    machine.link.break_off()
    await turns()
    told.fleet.submit(5)
    told.fleet.now_ns += 3 * NS_PER_S
    again = Machine("executor:2")
    await told.fleet.join(again)  # four of them have all of its rows
    await told.release(again, 1)
    told.fleet.now_ns += 1 * NS_PER_S
    await told.fleet.finish(again)
    await told.fleet.finish(again)

    parts = told.life(5).parts(told.fleet.now_ns)
    assert parts[PhaseSpan(RequestPhase.QUEUED, "behind_others")] == 3 * NS_PER_S
    assert told.kinds(1)[:4] == ["received", "assigned", "began", "executor_lost"]
    assert "no_executor" in [event.reason for event in told.life(1).events]
    assert told.life(1).parts(0)[PhaseSpan(RequestPhase.RECOVERING, "no_executor")] == 3 * NS_PER_S
    assert {event.reason for event in told.life(5).events if event.kind is LifeKind.WAITS} >= {
        "rows"
    }
    assert told.kinds(5)[-1] == "ended"
    await told.close()


async def test_life_tells_of_a_lost_executor() -> None:
    told, first, second = RecordedFleet(), Machine("executor:1"), Machine("executor:2")
    await told.fleet.join(first)
    told.fleet.submit(1)
    await turns()
    await told.release(first, 1)
    assert first.link is not None
    first.link.break_off()
    await turns()
    told.fleet.now_ns += 4 * NS_PER_S
    await told.fleet.join(second)
    await told.release(second, 2)

    assert told.kinds(1) == [
        "received",
        "assigned",
        "began",
        "first_token",
        "executor_lost",
        "waits",
        "assigned",
        "began",
        "resumed",
    ]
    resumed = told.event(1, LifeKind.RESUMED)
    lost = told.event(1, LifeKind.EXECUTOR_LOST)
    assert (lost.executor, resumed.executor) == ("executor:1", "executor:2")
    assert resumed.at_ns - lost.at_ns == 6 * NS_PER_S
    parts = told.life(1).parts(told.fleet.now_ns)
    assert parts[PhaseSpan(RequestPhase.PROMPT, "again", "executor:2")] == 2 * NS_PER_S
    assert sum(parts.values()) == told.fleet.now_ns
    await told.close()


async def test_life_tells_of_a_drained_executor() -> None:
    told, first, second = RecordedFleet(), Machine("executor:1"), Machine("executor:2")
    await told.fleet.join(first)
    told.fleet.submit(1)
    await turns()
    await told.fleet.join(second)
    draining = told.fleet.drain(first, 0)
    await turns()
    await told.fleet.finish(first)
    await told.fleet.finish(second)
    await draining

    taken = told.event(1, LifeKind.TAKEN_BACK)
    assert (taken.executor, taken.reason) == ("executor:1", "drained")
    assert told.life(1).executor == "executor:2"
    assert told.kinds(1)[-1] == "ended"
    await told.close()


@pytest.mark.parametrize(
    ("mode", "kind", "phase"),
    [
        (PreemptionMode.RECOMPUTE, LifeKind.PREEMPTED, RequestPhase.PREEMPTED),
        (PreemptionMode.SWAP, LifeKind.SWAPPED_OUT, RequestPhase.SWAPPED),
    ],
)
async def test_life_says_why_a_request_was_preempted(
    mode: PreemptionMode, kind: LifeKind, phase: RequestPhase
) -> None:
    told = RecordedFleet(ClusterConfig(policies=PolicyConfig(preemption_mode=mode)))
    machine = Machine("executor:1", num_host_blocks=48)
    await told.fleet.join(machine)
    for handle in (1, 2, 3):
        told.submit_long(handle, 20, 40)
    await turns()
    for _ in range(300):
        await told.release(machine)

    core_tally = told.fleet.cluster.executors[0].engine.placement.tally
    events = [e for life in told.recorder.ended for e in life.events]
    kinds = [event.kind for event in events]
    assert kinds.count(kind) == core_tally.num_preemptions > 0
    assert {e.reason for e in events if e.kind is kind} == {"blocks"}
    assert kinds.count(LifeKind.ENDED) == 3
    num_cached = sum(e.numbers["num_cached"] for e in events if e.kind is LifeKind.BEGAN)
    assert (num_cached > 0) == (mode is PreemptionMode.RECOMPUTE)
    waited = [part for life in told.recorder.ended for part in life.parts(0)]
    assert phase in {part.phase for part in waited}
    await told.close()


def test_refused_request_is_known_and_may_be_taken_later() -> None:
    told = RecordedFleet()
    message = api.GenerateRequest(request_id="mine", tenant="a")
    log = RequestLog(told.fleet.cluster)
    for _ in range(2):
        caller = Caller("c", "", frozenset({Scope.GENERATE}))
        with pytest.raises(DomainError), log.refusals(message, caller):
            raise DomainError("QUEUE_FULL", "9 wait; allowed: 9")
    (refused,) = told.recorder.ended
    assert [event.reason for event in refused.events] == ["QUEUE_FULL", "QUEUE_FULL"]
    assert [event.detail for event in refused.events] == ["9 wait; allowed: 9"] * 2
    assert (refused.request_id, refused.tenant, refused.client_key) == ("mine", "a", 0)

    name = RequestName("mine")
    request = Request.create(name.key, [1], SamplingParams(max_tokens=2), arrival=1, seed=1)
    told.recorder.see(submission(request, name))

    assert list(told.recorder.ended) == []
    (life,) = told.recorder.living
    assert [event.kind.value for event in life.events] == ["refused", "refused", "received"]


async def test_listener_is_told_until_it_ends() -> None:
    told, machine = RecordedFleet(), Machine("executor:1")
    heard: list[tuple[str, LifeKind]] = []
    end = told.recorder.listen(lambda life, event: heard.append((life.key, event.kind)))
    await told.fleet.join(machine)
    told.fleet.submit(1)
    await turns()
    await told.fleet.finish(machine)
    end()
    told.fleet.submit(2)
    await turns()

    assert heard == [("r1", event.kind) for event in told.life(1).events]
    await told.close()


def test_events_in_the_middle_are_left_out() -> None:
    life = Life("k", "r", "", 0)
    for number in range(100):
        life.add(number, LifeKind.ASSIGNED)

    assert len(life.events) == 64
    assert life.num_left_out == 36
    assert [event.at_ns for event in life.events[:16]] == list(range(16))
    assert life.events[-1].at_ns == 99


def test_waiting_for_two_things_in_turn_is_two_events() -> None:
    life = Life("k", "r", "", 0)
    told = [life.wait(number, ("rows", "blocks")[number % 2], "e") for number in range(50)]

    assert [event.reason for event in cast("list[LifeEvent]", told[:2])] == ["rows", "blocks"]
    assert told[2:] == [None] * 48
    parts = life.parts(50)
    assert (
        parts[PhaseSpan(RequestPhase.QUEUED, "rows", "e")]
        == parts[PhaseSpan(RequestPhase.QUEUED, "blocks", "e")]
        == 25
    )


async def test_life_tells_of_steps_that_failed() -> None:
    told, machine = RecordedFleet(), Machine("executor:1", guilty=2)
    await told.fleet.join(machine)
    told.fleet.submit(1, 2)
    await turns()
    for _ in range(40):
        await told.release(machine)

    assert told.kinds(1).count("kv_lost") >= 1
    assert told.kinds(1)[-1] == "ended"
    end = told.event(2, LifeKind.ENDED)
    assert end.reason == "EXECUTOR_LOST_REPEATEDLY"
    parts = told.life(1).parts(told.fleet.now_ns)
    assert PhaseSpan(RequestPhase.PROMPT, "again", "executor:1") in parts
    await told.close()


async def test_life_tells_that_a_suspect_is_tried_alone() -> None:
    told, machines = (
        RecordedFleet(ClusterConfig(max_executor_losses=1)),
        [Machine(f"executor:{number}") for number in (1, 2, 3)],
    )
    await told.fleet.join(machines[0])
    told.fleet.submit(1, 2)
    await turns()
    for machine, following in itertools.pairwise(machines):
        assert machine.link is not None
        machine.link.break_off()
        await turns()
        told.fleet.now_ns += NS_PER_S
        await told.fleet.join(following)

    for handle in (1, 2):
        quarantined = told.event(handle, LifeKind.QUARANTINED)
        assert (quarantined.at_ns, quarantined.numbers) == (0, {"num_trials": 2})
        kinds = told.kinds(handle)
        assert kinds[:4] == ["received", "assigned", "began", "executor_lost"]
        again = [e for e in told.life(handle).events if e.kind is LifeKind.ASSIGNED][1]
        assert (again.executor, again.reason) == ("executor:2", "tried_alone")
        waited = told.life(handle).parts(told.fleet.now_ns)
        assert waited[PhaseSpan(RequestPhase.RECOVERING, "quarantined", "executor:1")] == NS_PER_S
    # Of the second executor only one of them was there at that moment: that one has failed.
    assert [life.request_id for life in told.recorder.ended] == ["r1"]
    end = told.event(1, LifeKind.ENDED)
    assert end.reason == "EXECUTOR_LOST_REPEATEDLY"
    assert end.detail.startswith("2 executors in a row failed while computing this request")
    # The other one is tried no more, as the losses are explained.
    acquitted = told.event(2, LifeKind.ACQUITTED)
    assert (acquitted.at_ns, acquitted.reason) == (NS_PER_S, "another_failed")
    given = [e for e in told.life(2).events if e.kind is LifeKind.ASSIGNED][-1]
    assert (given.executor, given.reason) == ("executor:3", "only_one")
    await told.close()


async def test_life_tells_that_a_suspect_was_acquitted() -> None:
    told = RecordedFleet(ClusterConfig(max_executor_losses=1))
    first, second = Machine("executor:1"), Machine("executor:2")
    await told.fleet.join(first)
    told.fleet.submit(1, 2)
    await turns()
    await told.replace(first, second)
    await told.fleet.finish(second)

    for handle in (1, 2):
        assert told.kinds(handle)[-4:] == ["began", "first_token", "acquitted", "ended"]
        acquitted = told.event(handle, LifeKind.ACQUITTED)
        assert (acquitted.reason, acquitted.executor) == ("came_through", "executor:2")
    await told.close()


async def test_life_says_why_it_was_given_to_an_executor() -> None:
    told, machine = RecordedFleet(), Machine("executor:1")
    await told.fleet.join(machine)
    told.submit_long(1, 9, 4)
    await turns()
    await told.fleet.finish(machine)
    await told.fleet.join(Machine("executor:2"))
    told.submit_long(1, 12, 4)
    await turns()

    given = told.event(1, LifeKind.ASSIGNED)
    assert (given.executor, given.reason) == ("executor:1", "most_cached")
    assert given.numbers["num_cached"] == 8
    assert given.numbers["cost_us"] < given.numbers["cost_elsewhere_us"]
    assert "num_cached_elsewhere" not in given.numbers
    await told.close()


async def test_heads_are_looked_at_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, num_looks = RecordedFleet(), itertools.count(1)
    scheduler = told.fleet.cluster.scheduler
    await told.fleet.join(Machine("executor:1"))
    looked_at: list[int] = []
    heads = scheduler.heads

    def counted() -> list[tuple[Request, list[tuple[str, str]]]]:
        looked_at.append(next(num_looks))
        return heads()

    monkeypatch.setattr(scheduler, "heads", counted)
    told.fleet.submit(*range(1, 12))  # an executor has four rows
    await turns()
    assert looked_at == [1]
    told.fleet.now_ns += NS_PER_S // 10
    told.fleet.cluster.look_again()
    assert looked_at == [1, 2]
    told.fleet.cluster.look_again()
    assert looked_at == [1, 2]
    await told.close()


EMPTY = np.empty(0, np.int32)


class Rows:
    """StepRows, and lives by name."""

    def __init__(self, *names: str) -> None:
        self.lives = {name: Life(name, name, "", 0) for name in names}
        self.rows = StepRows()
        self._step_id = 0

    def send(
        self,
        rows: dict[int, int],
        new: dict[int, str] | None = None,
        num_new_tokens: int = 1,
        drafts: dict[int, int] | None = None,
        run_on: dict[int, int] | None = None,
        samples: bool = True,
    ) -> None:
        """A step with these rows, which have these stays."""
        self._step_id += 1
        num_rows = len(rows)
        counts = np.array([(drafts or {}).get(row, 0) for row in rows], np.int32)
        work = RowWork(
            np.array(list(rows), np.int64),
            np.array(list(rows.values()), np.int64),
            np.zeros(num_rows, np.int32),
            np.full(num_rows, num_new_tokens, np.int32),
            np.zeros(num_rows, np.int32),
            np.zeros(num_rows * num_new_tokens, np.int32),
            None if samples else np.zeros(num_rows, np.bool_),
            None if run_on is None else np.array([run_on.get(row, 0) for row in rows], np.int32),
            None if drafts is None else Drafts(counts, np.zeros(counts.sum(), np.int32)),
        )
        new_rows = [
            NewRow(_request(name).sequence, row_id, EMPTY, EMPTY)
            for row_id, name in (new or {}).items()
        ]
        writes = TableWrites(EMPTY, EMPTY, EMPTY, EMPTY)
        plan = StepPlan(self._step_id, None, (), new_rows, writes, BlockMoves(), work)
        self.rows.sent(plan, self.lives.get)

    def answer(self, *counts: int, status: StepStatus = StepStatus.OK) -> list[str]:
        """Who got the token that it awaited; the oldest step brought rows so many tokens."""
        token_ids = np.zeros(sum(counts), np.int32)
        outcome = StepOutcome(1, status, token_ids, token_counts=np.array(counts, np.int32))
        return [life.key for life in self.rows.answered(outcome)]

    def tell_part(self, step_id: int, *counts: int) -> list[str]:
        """Who got the token that it awaited, by so many further tokens of each row."""
        part = StepPart(step_id, np.array(counts, np.int32), np.zeros(sum(counts), np.int32))
        return [life.key for life in self.rows.progressed(part)]


def _request(name: str) -> Request:
    return Request.create(name, [1], SamplingParams(), arrival=1, seed=1)


def test_first_token_is_of_the_step_that_samples() -> None:
    rows = Rows("a", "b")
    rows.lives["a"].awaits_token = True
    rows.send({0: 7, 1: 8}, {0: "a", 1: "b"}, num_new_tokens=16, samples=False)
    rows.send({0: 7, 1: 8}, num_new_tokens=3)
    rows.send({0: 7, 1: 8})

    assert [rows.answer(0, 0), rows.answer(1, 1), rows.answer(1, 1)] == [[], ["a"], []]
    life = rows.lives["a"]
    assert (life.num_chunks, life.num_prompt_tokens) == (2, 19)
    assert rows.lives["b"].num_chunks == 0


def test_failed_step_brings_no_first_token() -> None:
    rows = Rows("a", "b")
    rows.lives["a"].awaits_token = True
    rows.send({0: 7}, {0: "a"})
    assert rows.answer(status=StepStatus.FAILED) == []

    rows.send({0: 8}, {0: "a"})
    rows.rows.forget(rows.lives["a"])
    rows.send({0: 9}, {0: "b"})

    assert rows.answer(1) == ["a"]  # it was under way
    assert rows.answer(1) == []


def test_drafts_are_those_of_the_stay_that_had_them() -> None:
    rows = Rows("a", "b")
    rows.send({0: 7, 2: 9}, {0: "a", 2: "b"}, drafts={0: 3, 2: 1})
    rows.send({0: 7, 2: 9}, drafts={0: 2})
    rows.answer(4, 1)
    rows.send({2: 10}, {2: "b"}, drafts={2: 5})  # another stay, of the same request
    rows.answer(2, 3)
    rows.answer(2)
    for life in rows.lives.values():
        rows.rows.settle(life)
        rows.rows.settle(life)

    counted = {k: (each.num_drafts, each.num_more_tokens) for k, each in rows.lives.items()}
    assert counted == {"a": (5, 4), "b": (6, 1)}
    assert {k: each.num_accepted for k, each in rows.lives.items()} == {"a": 4, "b": 1}


def test_tokens_beyond_the_guesses_are_those_of_running_on() -> None:
    rows = Rows("a", "b")
    rows.send({0: 7, 2: 9}, {0: "a", 2: "b"}, drafts={0: 2}, run_on={0: 3, 2: 3})
    rows.answer(5, 4)
    for life in rows.lives.values():
        rows.rows.settle(life)

    counted = {k: (each.num_more_tokens, each.num_accepted) for k, each in rows.lives.items()}
    assert counted == {"a": (4, 2), "b": (3, 0)}


def test_parts_of_a_result_are_counted_once() -> None:
    rows = Rows("a", "b")
    rows.lives["a"].awaits_token = True
    rows.send({0: 7, 2: 9}, {0: "a", 2: "b"}, num_new_tokens=3, run_on={0: 3, 2: 3})

    assert rows.tell_part(1, 1, 0) == ["a"]
    assert rows.tell_part(1, 1, 2) == []
    assert rows.tell_part(2, 4, 4) == []  # of a step that is not known
    assert rows.answer(4, 2) == []
    for life in rows.lives.values():
        rows.rows.settle(life)
    assert {k: each.num_more_tokens for k, each in rows.lives.items()} == {"a": 3, "b": 1}


NUM_PLACES = 5


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12)), max_size=60),
    st.booleans(),
)
def test_whoever_has_most_gives_a_place_when_all_are_taken(
    added: list[tuple[str, int]], gives_oldest: bool
) -> None:
    places = BoundedLives(NUM_PLACES, gives_oldest=gives_oldest)
    kept: list[tuple[str, str]] = []  # tenant and key, oldest first
    for tenant, number in added:
        key = f"{tenant}{number}"
        places.add(Life(key, key, tenant, 0))
        if (tenant, key) in kept:
            kept.remove((tenant, key))
        kept.append((tenant, key))
        if len(kept) > NUM_PLACES:
            numbers = Counter(each for each, _ in kept)
            in_turn = kept if gives_oldest else kept[::-1]
            assert sum(places.get(k) is None for _, k in kept) == 1
            lost = next(each for each in kept if places.get(each[1]) is None)
            assert numbers[lost[0]] == max(numbers.values())
            assert lost == next(each for each in in_turn if each[0] == lost[0])
            kept.remove(lost)
        assert len(places) == len(kept)

    assert sorted(life.key for life in places) == sorted(key for _, key in kept)
