from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.core.outcomes.losses import MAX_FRUITLESS_LOSSES
from scheduler_service.core.outcomes.results import Results
from scheduler_service.core.planning.step_planner import StepPlanner
from scheduler_service.core.request import Request
from scheduler_service.core.sampling_params import BeamParams
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.executors.broken_core import MESSAGE, REASON, CoreBroken
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


@pytest.mark.parametrize("at_call", [1, 4, 7])
@pytest.mark.parametrize("part", ["_publish_decoded", "_take_tokens", "_record"])
async def test_clients_get_every_token_once_when_apply_raises_half_way(
    monkeypatch: pytest.MonkeyPatch, part: str, at_call: int
) -> None:
    broken = Broken(monkeypatch, Results, part)
    broken.at_call = at_call
    await check_tokens_after_a_break()


async def test_clients_get_every_token_once_when_apply_raises_after_they_were_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Results._record

    def record(results: Results, row_ids: Any, token_ids: Any) -> None:  # noqa: ANN401
        original(results, row_ids, token_ids)
        if results._rows.num_known[row_ids].max() == 8:
            raise AssertionError("after all were recorded")

    monkeypatch.setattr(Results, "_record", record)
    await check_tokens_after_a_break(monkeypatch)


async def check_tokens_after_a_break(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    clients = Clients()
    loop = a_loop(clients)
    for number in (1, 2, 3):
        loop.scheduler.add(a_request(number))

    assert isinstance(await run_until_lost(loop), CoreBroken)
    requests = loop.evacuate()

    assert len(requests) == 3
    if monkeypatch is not None:
        monkeypatch.undo()
    await finish_elsewhere(requests, clients)
    for number in (1, 2, 3):
        expected = expected_tokens([number, 2, 3], 10, number, VOCAB_SIZE)
        assert clients.tokens[number] == expected


@pytest.mark.parametrize("part", ["_publish_decoded", "_take_tokens", "_record"])
async def test_clients_get_prompt_logprobs_once_when_apply_raises_half_way(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    Broken(monkeypatch, Results, part)
    clients = Clients()
    loop = a_loop(clients)
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
        Broken(monkeypatch, StepPlanner, "_fill")
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
    Broken(monkeypatch, Results, "_record").at_call = 3
    loop = a_loop(Clients())
    loop.scheduler.add(a_request(1))
    loop.scheduler.add(a_request(2, **params))

    await run_until_lost(loop)
    requests = loop.evacuate()

    errors = {request.request_id: request.error for request in requests}
    assert errors == {"r1": None, "r2": (REASON, MESSAGE)}


async def test_request_ends_with_an_error_when_its_end_was_lost_with_its_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Results.finish_if_stopped

    def finish_if_stopped(results: Results, sequence: Any) -> None:  # noqa: ANN401
        original(results, sequence)
        raise AssertionError("after the end")

    monkeypatch.setattr(Results, "finish_if_stopped", finish_if_stopped)
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
    Broken(monkeypatch, StepPlanner, "_plan")
    Broken(monkeypatch, Scheduler, "evacuate")
    loop = a_loop(Clients())
    loop.scheduler.add(a_request(1))

    await run_until_lost(loop)

    assert loop.evacuate() == []
    assert "core_evacuation_failed" in caplog.text
