"""What nobody foresaw costs the requests that it concerns, and not the session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client import (
    AsyncClient,
    ClientConfig,
    Finish,
    FinishReason,
    InvalidRequest,
    RetryPolicy,
    SamplingParams,
    SchedulingParams,
    SplitserveError,
)
from splitserve_client.session import Session
from splitserve_client.session_request import UnreadBudget
from tests.support.fakes.fake_generation import expected_tokens
from tests.support.processes.patience import PATIENCE_S
from tests.unit.client.test_client import collect

Messages = AsyncIterator[api.SessionRequest]
Responses = AsyncGenerator[api.SessionResponse, None]


class Streams:
    """Streams of a session that do one after the other what a test says."""

    def __init__(self, *serve: Callable[[Messages], Responses]) -> None:
        self._serve = list(serve)

    def session(self) -> Session:
        async def max_message_bytes() -> float:
            return 1e9

        return Session(
            lambda messages: self._serve.pop(0)(messages),
            max_message_bytes,
            RetryPolicy(),
            ClientConfig().timing,
            UnreadBudget(),
            lambda refusal: refusal.reason == "DRAINING",
        )


def event_of(message: api.SessionRequest, **event: Any) -> api.SessionResponse:  # noqa: ANN401
    return api.SessionResponse(events=[api.SessionEvent(handle=message.submit.handle, **event)])


async def finish_each(messages: Messages) -> Responses:
    async for message in messages:
        yield event_of(message, finish=api.Finish(reason=api.FINISH_REASON_STOP))


def break_at_first(error: BaseException) -> Callable[[Messages], Responses]:
    async def serve(messages: Messages) -> Responses:
        async for _ in messages:
            raise error
        yield api.SessionResponse()

    return serve


async def within_patience(reading: Awaitable[Any]) -> Any:  # noqa: ANN401
    return await asyncio.wait_for(reading, PATIENCE_S)


async def is_finished(session: Session) -> bool:
    _, finish = await within_patience(collect(session.submit([1])))
    assert isinstance(finish, Finish)
    return finish.reason is FinishReason.STOP


@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError()])
async def test_session_fails_its_requests_and_stays_usable_when_its_stream_breaks_unforeseen(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async with Streams(break_at_first(error), finish_each).session() as session:
        reading = [collect(session.submit([number])) for number in range(2)]
        ends = await within_patience(asyncio.gather(*reading, return_exceptions=True))
        assert [type(end) for end in ends] == [SplitserveError, SplitserveError]
        assert await is_finished(session)
    assert [record.getMessage() for record in caplog.records] == ["session_broken"]


async def test_session_fails_what_a_left_stream_has_when_that_breaks_unforeseen() -> None:
    may_break = asyncio.Event()

    async def refuse_second(messages: Messages) -> Responses:
        await anext(messages)
        second = await anext(messages)
        yield event_of(second, rejected=api.RequestError(reason="DRAINING", message="not here"))
        await may_break.wait()
        raise RuntimeError("a bug")

    async with Streams(refuse_second, finish_each).session() as session:
        first, second = session.submit([1]), session.submit([2])
        _, finish = await within_patience(collect(second))
        assert finish.reason is FinishReason.STOP
        may_break.set()
        with pytest.raises(SplitserveError, match="log"):
            await within_patience(collect(first))
        assert await is_finished(session)


async def test_session_fails_one_request_when_it_cannot_be_encoded(client: AsyncClient) -> None:
    params = SamplingParams(seed=1, max_tokens=3)
    async with client.session() as session:
        good = session.submit([1], params)
        for scheduling in (SchedulingParams(priority=2**31), SchedulingParams(cache_salt="\ud800")):
            bad = session.submit([2], params, scheduling=scheduling)
            with pytest.raises(InvalidRequest, match="encoded"):
                await within_patience(collect(bad))
        bad = session.submit([2], params, credential="\ud800")
        with pytest.raises(InvalidRequest, match="encoded"):
            await within_patience(collect(bad))
        token_ids, _ = await within_patience(collect(good))
    assert token_ids == expected_tokens([1], 1, 3)
