"""Tests what streams hold whose clients do not read, and when they end.

The rpcs are called without gRPC, which would take some MiB off the streams by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest

from scheduler_service.config import ClusterConfig
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client import AsyncClient, SamplingParams
from splitserve_contract import DomainError
from tests.contract.stranger.process import poll
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.patience import PATIENT
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process
from tests.support.security.credentials import LocalCall

BOUND = 16 * 1024
CONFIG = ClusterConfig(reconnect_timeout_s=0.1, max_unread_bytes=BOUND)
PROMPT = [1, 2, 3]
CONTEXT = LocalCall()


def chatty(**params: object) -> api.GenerateRequest:
    """A request whose tokens with their scores are some 60 KiB."""
    sampling_params = api.SamplingParams(**{"num_logprobs": 20, "max_tokens": 250, **params})  # type: ignore[arg-type]
    return api.GenerateRequest(prompt_token_ids=PROMPT, sampling_params=sampling_params)


def refused() -> api.SessionRequest:
    return api.SessionRequest(submit=api.SessionSubmit(handle=1))


def submission(handle: int, request: api.GenerateRequest) -> api.SessionRequest:
    return api.SessionRequest(submit=api.SessionSubmit(handle=handle, request=request))


async def sent(*messages: api.SessionRequest) -> AsyncIterator[api.SessionRequest]:
    """What a client submits that then keeps its side open."""
    for message in messages:
        yield message
    await asyncio.Event().wait()


async def wait_until(holds: Callable[[], bool]) -> None:
    """Raises TimeoutError."""

    async def ask() -> tuple[bool, None]:
        await asyncio.sleep(0)
        return holds(), None

    await poll(ask)


def held_bytes(scheduler: SchedulerInProcess) -> int:
    return scheduler.cluster.delivery.unread.num_bytes


async def test_generate_ends_by_name_when_it_is_not_read() -> None:
    async with scheduler_in_process(FakeExecutor(), config=CONFIG) as scheduler:
        stream = scheduler.servicer.Generate(chatty(), CONTEXT)
        await anext(stream)
        await wait_until(lambda: scheduler.cluster.num_unfinished == 0)
        assert held_bytes(scheduler) == 0
        with pytest.raises(DomainError) as caught:
            await anext(stream)
        assert caught.value.reason == "STREAM_NOT_READ"
        assert str(BOUND) in caught.value.message


async def test_unread_session_ends_and_another_goes_on() -> None:
    params = SamplingParams(seed=1, max_tokens=250)
    async with (
        scheduler_in_process(FakeExecutor(), config=CONFIG) as scheduler,
        AsyncClient(scheduler.address, PATIENT) as client,
        client.session() as session,
    ):
        busy = session.submit(PROMPT, params)
        messages = sent(*(submission(handle, chatty()) for handle in range(3)))
        stream = scheduler.servicer.Session(messages, CONTEXT)
        await anext(stream)
        await wait_until(lambda: scheduler.cluster.num_unfinished <= 1)
        with pytest.raises(DomainError) as caught:
            async for _ in stream:
                pass
        assert caught.value.reason == "STREAM_NOT_READ"
        token_ids = [i async for event in busy for i in getattr(event, "token_ids", ())]
    assert tuple(token_ids) == expected_completions(PROMPT, params)[0].token_ids


async def test_unread_session_takes_no_more_requests() -> None:
    may_go_on = asyncio.Event()

    async def messages() -> AsyncIterator[api.SessionRequest]:
        yield submission(1, chatty())
        await may_go_on.wait()
        yield submission(2, chatty())

    async with scheduler_in_process(FakeExecutor(), config=CONFIG) as scheduler:
        stream = scheduler.servicer.Session(messages(), CONTEXT)
        await anext(stream)
        await wait_until(lambda: scheduler.cluster.num_unfinished == 0)
        may_go_on.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert scheduler.cluster.num_unfinished == 0
        with pytest.raises(DomainError) as caught:
            await anext(stream)
        assert caught.value.reason == "STREAM_NOT_READ"


async def test_failed_session_gives_way_when_all_hold_too_much() -> None:
    """Its error comes after what is queued, which is bounded even so."""
    no_action = api.SessionRequest()
    async with scheduler_in_process(FakeExecutor(), config=CONFIG) as scheduler:
        crowd = [
            scheduler.servicer.Session(sent(*[refused()] * 35, no_action), CONTEXT)
            for _ in range(80)
        ]
        for stream in crowd:
            await anext(stream)
            assert held_bytes(scheduler) <= 16 * BOUND
        for stream in crowd:
            await stream.aclose()
        assert held_bytes(scheduler) == 0


async def test_session_waits_when_its_refusals_are_unread() -> None:
    num_taken = 0

    async def refusals() -> AsyncIterator[api.SessionRequest]:
        nonlocal num_taken
        while True:
            num_taken += 1
            yield refused()
            await asyncio.sleep(0)

    async with scheduler_in_process(FakeExecutor(), config=CONFIG) as scheduler:
        async with aclosing(scheduler.servicer.Session(refusals(), CONTEXT)) as stream:
            first = await anext(stream)
            await wait_until(lambda: held_bytes(scheduler) > BOUND // 2)
            num_before = num_taken
            for _ in range(100):
                await asyncio.sleep(0)
            assert num_taken == num_before
            assert held_bytes(scheduler) < BOUND // 2 + 2 * len(first) + 200
            for _ in range(num_before):  # once they are read, it is
                await anext(stream)
            await wait_until(lambda: num_taken > num_before)
        assert held_bytes(scheduler) == 0


async def test_largest_stream_ends_when_all_together_hold_too_much() -> None:
    """None holds too much by itself, but a crowd of refusals does."""
    async with scheduler_in_process(FakeExecutor(), config=CONFIG) as scheduler:
        crowd = [
            scheduler.servicer.Session(sent(*[refused()] * count), CONTEXT)
            for count in [40, *[35] * 80]
        ]
        for stream in crowd:
            await anext(stream)
            assert held_bytes(scheduler) <= 16 * BOUND
        with pytest.raises(DomainError) as caught:
            async for _ in crowd[0]:
                pass
        assert caught.value.reason == "STREAM_NOT_READ"
        await anext(crowd[-1])
        for stream in crowd:
            await stream.aclose()
        assert held_bytes(scheduler) == 0


@pytest.mark.parametrize("params", [{"n": 4}, {"n": 3, "best_of": 4}, {"num_prompt_logprobs": 20}])
async def test_read_stream_brings_all_however_much_comes(
    params: dict[str, int],
) -> None:
    config = ClusterConfig(reconnect_timeout_s=0.1, max_unread_bytes=4096)
    async with scheduler_in_process(FakeExecutor(), config=config) as scheduler:
        num_tokens = 0
        async for data in scheduler.servicer.Generate(chatty(max_tokens=60, **params), CONTEXT):
            response = api.GenerateResponse.FromString(data)
            num_tokens += len(response.tokens.token_ids)
        assert num_tokens == 60 * params.get("n", 1)
        assert response.HasField("finish")
        messages = sent(submission(1, chatty(max_tokens=60, **params)))
        async with aclosing(scheduler.servicer.Session(messages, CONTEXT)) as stream:
            async for data in stream:
                events = api.SessionResponse.FromString(data).events
                num_tokens += sum(len(event.tokens.token_ids) for event in events)
                if events[-1].HasField("finish"):
                    break
        assert num_tokens == 2 * 60 * params.get("n", 1)
        assert held_bytes(scheduler) == 0
