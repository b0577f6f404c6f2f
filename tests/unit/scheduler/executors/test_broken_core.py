from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scheduler_service.core.blocks.prefix_cache import PrefixCache
from scheduler_service.core.endings import Endings
from scheduler_service.core.outcomes.losses import MAX_FRUITLESS_LOSSES
from scheduler_service.core.outcomes.results import Results
from scheduler_service.core.plan import StepEvents, StepOutcome, StepPlan
from scheduler_service.core.planning.growing_rows import GrowingRows
from scheduler_service.core.request import Request
from scheduler_service.core.row_columns import RowColumns
from scheduler_service.core.sampling_params import BeamParams
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.scheduler.executor_state import ExecutorState
from scheduler_service.scheduler.rescue import MESSAGE, REASON, CoreBroken
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.checked_engine import expected_hypotheses
from tests.support.core.engine_loops import (
    CONFIG,
    VOCAB_SIZE,
    Broken,
    Clients,
    LoopLink,
    a_loop,
    a_request,
    finish_elsewhere,
    run_until_lost,
)
from tests.support.fakes.fake_chain import expected_tokens
from tests.support.fakes.fake_logprobs import fake_logprob

# What `apply` asks on its way: before anything, when prompt logprobs and full blocks are taken, and
# when it is about to append tokens.
TAKE, PUBLISH, CHARGE = (
    (Results, "take"),
    (PrefixCache, "publish_rows"),
    (Results, "charge_tenant"),
)


def a_fair_loop(clients: Clients) -> ExecutorState:
    """Its core charges tenants for every token."""
    return a_loop(clients, Scheduler(replace(CONFIG, queue_policy="fair")))


def raise_after_take(monkeypatch: pytest.MonkeyPatch, step_id: int) -> None:
    """Makes `apply` raise, once, when it has taken all that the result of a step brought."""
    original = Results.take

    def take(results: Results, plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
        original(results, plan, outcome, events)
        if plan.step_id == step_id:
            monkeypatch.undo()
            raise AssertionError("after all was taken")

    monkeypatch.setattr(Results, "take", take)


@pytest.mark.parametrize(
    ("part", "at_call"),
    [*((part, call) for part in (TAKE, CHARGE) for call in (1, 4, 7)), (PUBLISH, 1), (PUBLISH, 2)],
)
async def test_clients_get_every_token_once_when_apply_raises_half_way(
    monkeypatch: pytest.MonkeyPatch, part: tuple[type, str], at_call: int
) -> None:
    Broken(monkeypatch, *part).at_call = at_call
    await check_tokens_after_a_break()


async def test_clients_get_every_token_once_when_apply_raises_after_all_was_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raise_after_take(monkeypatch, step_id=6)
    await check_tokens_after_a_break()


async def check_tokens_after_a_break() -> None:
    clients = Clients()
    loop = a_fair_loop(clients)
    for number in (1, 2, 3):
        loop.scheduler.add(a_request(number))

    assert isinstance(await run_until_lost(loop), CoreBroken)
    requests = loop.evacuate()

    assert len(requests) == 3
    await finish_elsewhere(requests, clients)
    for number in (1, 2, 3):
        expected = expected_tokens([number, 2, 3], 10, number, VOCAB_SIZE)
        assert clients.tokens[number] == expected


@pytest.mark.parametrize("when", ["before", "half way", "after"])
async def test_clients_get_prompt_logprobs_once_when_apply_raises(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if when == "after":
        raise_after_take(monkeypatch, step_id=1)
    else:
        Broken(monkeypatch, *(TAKE if when == "before" else CHARGE))
    clients = Clients()
    loop = a_fair_loop(clients)
    loop.scheduler.add(a_request(1, num_prompt_logprobs=1))

    assert isinstance(await run_until_lost(loop), CoreBroken)
    await finish_elsewhere(loop.evacuate(), clients)

    assert clients.prompt_positions == {1: [1, 2]}


def a_token_too_few(result: pb.StepResult) -> None:
    """Nobody can say whose token is missing."""
    result.sampled_token_ids = result.sampled_token_ids[:-4]


def a_status_too_many(result: pb.StepResult) -> None:
    """One more than there are rows."""
    num_rows = len(result.sampled_token_ids) // 4
    result.row_statuses = bytes([pb.ROW_STATUS_OK] * (num_rows + 1))


def another_step(result: pb.StepResult) -> None:
    """It answers a step that is not the oldest."""
    result.step_id += 1


@pytest.mark.parametrize("step_id", [1, 3])
@pytest.mark.parametrize("spoil", [a_token_too_few, a_status_too_many, another_step])
async def test_nothing_is_lost_or_told_twice_when_a_result_breaks_the_contract(
    spoil: Callable[[pb.StepResult], None], step_id: int
) -> None:
    clients, link = Clients(), LoopLink(CONFIG)
    loop = a_loop(clients, link=link)
    link.alter = lambda result: spoil(result) if result.step_id == step_id else None
    for request in several_requests():
        loop.scheduler.add(request)

    error = await run_until_lost(loop)
    requests = loop.evacuate()

    assert not isinstance(error, CoreBroken)
    assert not any(request.is_finished for request in requests)
    await finish_elsewhere(requests, clients)
    check_completions(requests, clients)


def several_requests() -> list[Request]:
    """Plain with prompt logprobs, the best of three, and beams."""
    plain = a_request(1, num_prompt_logprobs=1)
    best = a_request(2, n=2, best_of=3, num_logprobs=1)
    return [plain, best, a_request(3, beam=BeamParams(3), n=3)]


def check_completions(requests: list[Request], clients: Clients) -> None:
    """They are what they would be if nothing had happened."""
    _, best, beams = sorted(requests, key=lambda request: request.arrival)
    assert clients.prompt_positions == {1: [1, 2]}
    assert clients.tokens[1] == expected_tokens([1, 2, 3], 10, 1, VOCAB_SIZE)
    hypotheses = expected_hypotheses(beams, VOCAB_SIZE)
    found = [(c.token_ids, c.score) for c in beams.completions]
    assert found == [(list(h.token_ids), h.score) for h in hypotheses]
    for completion in best.completions:
        assert completion.cumulative_logprob == sum(map(fake_logprob, completion.token_ids))
        assert [scored.token_id for scored in completion.scored] == completion.token_ids


async def test_request_ends_when_every_core_that_gets_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = a_request(1)
    num_cores = 0
    while not request.is_finished:
        num_cores += 1
        Broken(monkeypatch, GrowingRows, "grow")
        loop = a_loop(Clients())
        loop.scheduler.readmit(request)
        await run_until_lost(loop)
        (request,) = loop.evacuate()
        monkeypatch.undo()

    assert num_cores == MAX_FRUITLESS_LOSSES
    assert request.error == (REASON, MESSAGE)


@pytest.mark.parametrize("params", [{"beam": BeamParams(2)}, {"n": 1, "best_of": 2}])
async def test_request_ends_when_apply_raises_and_its_state_is_not_in_its_tokens(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, object]
) -> None:
    Broken(monkeypatch, *CHARGE).at_call = 3
    loop = a_fair_loop(Clients())
    loop.scheduler.add(a_request(1))
    loop.scheduler.add(a_request(2, **params))

    await run_until_lost(loop)
    requests = loop.evacuate()

    errors = {request.request_id: request.error for request in requests}
    assert errors == {"r1": None, "r2": (REASON, MESSAGE)}


async def test_request_ends_with_an_error_when_its_end_was_lost_with_its_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Endings.finish_if_stopped

    def finish_if_stopped(endings: Endings, sequence: Any) -> None:  # noqa: ANN401
        original(endings, sequence)
        raise AssertionError("after the end")

    monkeypatch.setattr(Endings, "finish_if_stopped", finish_if_stopped)
    clients = Clients()
    loop = a_loop(clients)
    loop.scheduler.add(a_request(1, max_tokens=3))

    await run_until_lost(loop)
    requests = loop.evacuate()

    assert [request.error for request in requests] == [(REASON, MESSAGE)]
    assert len(clients.tokens[1]) == 2
    assert clients.finished == []


async def test_evacuation_gives_nobody_when_that_fails_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Broken(monkeypatch, RowColumns, "plan_work")
    Broken(monkeypatch, Scheduler, "evacuate")
    loop = a_loop(Clients())
    loop.scheduler.add(a_request(1))

    await run_until_lost(loop)

    assert loop.evacuate() == []
    assert "core_evacuation_failed" in caplog.text
