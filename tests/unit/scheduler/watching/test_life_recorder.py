"""What is written down of requests, by a clock that stands still unless it is moved."""

from __future__ import annotations

import itertools
from typing import cast

import pytest

from scheduler_service.callers.caller import Caller, Scope
from scheduler_service.config import ClusterConfig
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values.config import PolicyConfig, PreemptionMode
from scheduler_service.scheduler.values.request import Request
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from scheduler_service.service.refusals import RequestLog
from scheduler_service.watching.life import Life, LifeEvent, LifeKind, Part, Phase
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError
from tests.support.core.machines import Machine
from tests.support.core.some_turns import submitted
from tests.support.core.stepped_fleet import turns
from tests.support.core.told_fleet import S, ToldFleet


async def test_life_has_what_happened_and_when_of_a_request_that_nothing_hinders() -> None:
    told, machine = ToldFleet(), Machine("executor:1")
    await told.fleet.join(machine)

    told.fleet.submit(1)
    await turns()
    await told.release(machine, 2)
    await told.fleet.finish(machine)

    life = told.life(1)
    assert told.kinds(1) == ["received", "given", "began", "first_token", "ended"]
    assert [event.at_ns for event in life.events] == [0, 0, 0, 2 * S, 2 * S]
    assert told.event(1, LifeKind.RECEIVED).numbers == {"num_waiting": 0, "num_prompt_tokens": 1}
    assert told.event(1, LifeKind.BEGAN).numbers == {"num_tokens": 1, "num_cached": 0}
    first = told.event(1, LifeKind.FIRST_TOKEN)
    assert (first.executor, first.numbers["num_chunks"]) == ("executor:1", 1)
    end = told.event(1, LifeKind.ENDED)
    assert (end.reason, end.numbers["num_output_tokens"]) == ("length", 5)
    assert life.parts(99 * S) == {Part(Phase.PROMPT, "", "executor:1"): 2 * S}
    await told.close()


async def test_life_says_why_it_waits_when_no_executor_is_there_and_when_rows_are_taken() -> None:
    told, machine = ToldFleet(), Machine("executor:1")
    await told.fleet.join(machine)
    told.fleet.submit(1, 2, 3, 4)
    await turns()
    assert machine.link is not None
    machine.link.break_off()
    await turns()
    told.fleet.submit(5)
    told.fleet.now_ns += 3 * S
    again = Machine("executor:2")
    await told.fleet.join(again)  # four of them have all of its rows
    await told.release(again, 1)
    told.fleet.now_ns += 1 * S
    await told.fleet.finish(again)
    await told.fleet.finish(again)

    parts = told.life(5).parts(told.fleet.now_ns)
    assert parts[Part(Phase.QUEUED, "behind_others")] == 3 * S
    assert told.kinds(1)[:4] == ["received", "given", "began", "executor_lost"]
    assert "no_executor" in [event.reason for event in told.life(1).events]
    assert told.life(1).parts(0)[Part(Phase.RECOVERING, "no_executor")] == 3 * S
    assert {event.reason for event in told.life(5).events if event.kind is LifeKind.WAITS} >= {
        "rows"
    }
    assert told.kinds(5)[-1] == "ended"
    await told.close()


async def test_life_tells_of_a_lost_executor_and_who_went_on_when_it_was_generating() -> None:
    told, first, second = ToldFleet(), Machine("executor:1"), Machine("executor:2")
    await told.fleet.join(first)
    told.fleet.submit(1)
    await turns()
    await told.release(first, 1)
    assert first.link is not None
    first.link.break_off()
    await turns()
    told.fleet.now_ns += 4 * S
    await told.fleet.join(second)
    await told.release(second, 2)

    assert told.kinds(1) == [
        "received",
        "given",
        "began",
        "first_token",
        "executor_lost",
        "waits",
        "given",
        "began",
        "resumed",
    ]
    resumed = told.event(1, LifeKind.RESUMED)
    lost = told.event(1, LifeKind.EXECUTOR_LOST)
    assert (lost.executor, resumed.executor) == ("executor:1", "executor:2")
    assert resumed.at_ns - lost.at_ns == 6 * S
    parts = told.life(1).parts(told.fleet.now_ns)
    assert parts[Part(Phase.PROMPT, "again", "executor:2")] == 2 * S
    assert sum(parts.values()) == told.fleet.now_ns
    await told.close()


async def test_life_tells_that_it_was_taken_back_when_its_executor_is_drained() -> None:
    told, first, second = ToldFleet(), Machine("executor:1"), Machine("executor:2")
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
        (PreemptionMode.RECOMPUTE, LifeKind.PREEMPTED, Phase.PREEMPTED),
        (PreemptionMode.SWAP, LifeKind.SWAPPED_OUT, Phase.SWAPPED),
    ],
)
async def test_life_says_how_and_why_it_was_preempted_when_blocks_run_out(
    mode: PreemptionMode, kind: LifeKind, phase: Phase
) -> None:
    told = ToldFleet(ClusterConfig(policies=PolicyConfig(preemption_mode=mode)))
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


def test_refused_request_is_known_by_its_id_and_goes_on_when_it_is_taken_at_last() -> None:
    told = ToldFleet()
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
    told.recorder.see(submitted(request, name))

    assert list(told.recorder.ended) == []
    (life,) = told.recorder.living
    assert [event.kind.value for event in life.events] == ["refused", "refused", "received"]


async def test_listener_is_told_of_what_happens_until_it_wants_no_more() -> None:
    told, machine = ToldFleet(), Machine("executor:1")
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


def test_events_in_the_middle_are_left_out_when_there_are_too_many() -> None:
    life = Life("k", "r", "", 0)
    for number in range(100):
        life.add(number, LifeKind.GIVEN)

    assert len(life.events) == 64
    assert life.num_left_out == 36
    assert [event.at_ns for event in life.events[:16]] == list(range(16))
    assert life.events[-1].at_ns == 99


def test_waiting_for_two_things_in_turn_is_two_events_when_it_goes_on_for_long() -> None:
    life = Life("k", "r", "", 0)
    told = [life.wait(number, ("rows", "blocks")[number % 2], "e") for number in range(50)]

    assert [event.reason for event in cast("list[LifeEvent]", told[:2])] == ["rows", "blocks"]
    assert told[2:] == [None] * 48
    parts = life.parts(50)
    assert parts[Part(Phase.QUEUED, "rows", "e")] == parts[Part(Phase.QUEUED, "blocks", "e")] == 25


async def test_life_tells_of_steps_that_failed_when_a_request_is_the_reason() -> None:
    told, machine = ToldFleet(), Machine("executor:1", guilty=2)
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
    assert Part(Phase.PROMPT, "again", "executor:1") in parts
    await told.close()


async def test_life_tells_that_it_is_tried_alone_and_where_when_executors_died_of_it() -> None:
    told, machines = (
        ToldFleet(ClusterConfig(max_executor_losses=1)),
        [Machine(f"executor:{number}") for number in (1, 2, 3)],
    )
    await told.fleet.join(machines[0])
    told.fleet.submit(1, 2)
    await turns()
    for machine, following in itertools.pairwise(machines):
        assert machine.link is not None
        machine.link.break_off()
        await turns()
        told.fleet.now_ns += S
        await told.fleet.join(following)

    for handle in (1, 2):
        quarantined = told.event(handle, LifeKind.QUARANTINED)
        assert (quarantined.at_ns, quarantined.numbers) == (0, {"num_trials": 2})
        kinds = told.kinds(handle)
        assert kinds[:4] == ["received", "given", "began", "executor_lost"]
        again = [e for e in told.life(handle).events if e.kind is LifeKind.GIVEN][1]
        assert (again.executor, again.reason) == ("executor:2", "tried_alone")
        waited = told.life(handle).parts(told.fleet.now_ns)
        assert waited[Part(Phase.RECOVERING, "quarantined", "executor:1")] == S
    # Of the second executor only one of them was there at that moment: that one has failed.
    assert [life.request_id for life in told.recorder.ended] == ["r1"]
    end = told.event(1, LifeKind.ENDED)
    assert end.reason == "EXECUTOR_LOST_REPEATEDLY"
    assert end.detail.startswith("2 executors were lost while they computed it")
    # The other one is tried no more, as the losses are explained.
    acquitted = told.event(2, LifeKind.ACQUITTED)
    assert (acquitted.at_ns, acquitted.reason) == (S, "another_failed")
    given = [e for e in told.life(2).events if e.kind is LifeKind.GIVEN][-1]
    assert (given.executor, given.reason) == ("executor:3", "only_one")
    await told.close()


async def test_life_tells_that_it_came_through_when_it_was_tried_alone() -> None:
    told = ToldFleet(ClusterConfig(max_executor_losses=1))
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
    told, machine = ToldFleet(), Machine("executor:1")
    await told.fleet.join(machine)
    told.submit_long(1, 9, 4)
    await turns()
    await told.fleet.finish(machine)
    await told.fleet.join(Machine("executor:2"))
    told.submit_long(1, 12, 4)
    await turns()

    given = told.event(1, LifeKind.GIVEN)
    assert (given.executor, given.reason) == ("executor:1", "most_cached")
    assert given.numbers["num_cached"] == 8
    assert given.numbers["cost_us"] < given.numbers["cost_elsewhere_us"]
    assert "num_cached_elsewhere" not in given.numbers
    await told.close()


async def test_heads_are_looked_at_once_in_a_while_however_many_turns_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, num_looks = ToldFleet(), itertools.count(1)
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
    told.fleet.now_ns += S // 10
    told.fleet.cluster.look_again()
    assert looked_at == [1, 2]
    told.fleet.cluster.look_again()
    assert looked_at == [1, 2]
    await told.close()
