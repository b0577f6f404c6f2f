"""Sessions: resumption, aborts, patience, and faults of single requests."""

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
    ServerUnreachable,
    Session,
    SessionRequest,
    SplitserveError,
    UnreadBudget,
)
from splitserve_contract import DomainError
from tests.support.fakes.fake_scheduler import Cut, FakeScheduler, expected_tokens
from tests.support.processes.patience import PATIENCE_S
from tests.unit.client.conftest import VirtualTime
from tests.unit.client.test_client import collect, cut_at


@pytest.mark.parametrize(("takes_submissions", "num_messages"), [(False, 7), (True, 2)])
async def test_session_submits_together_what_the_server_takes_together(
    client: AsyncClient, fake: FakeScheduler, *, takes_submissions: bool, num_messages: int
) -> None:
    fake.takes_submissions = takes_submissions
    async with client.session() as session:
        await collect(session.submit([1], SamplingParams(seed=1, max_tokens=2)))
        streams = [session.submit([n], SamplingParams(seed=n, max_tokens=3)) for n in range(6)]
        results = await asyncio.gather(*map(collect, streams))

    assert len(fake.session_messages) == num_messages
    for n, (token_ids, _) in enumerate(results):
        assert token_ids == expected_tokens([n], n, 3)


async def test_session_submits_large_requests_in_messages_of_their_own(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.takes_submissions = True
    prompt = [2**28] * 40_000
    async with client.session() as session:
        await collect(session.submit([1], SamplingParams(seed=1, max_tokens=2)))
        streams = [session.submit(prompt, SamplingParams(seed=1, max_tokens=2)) for _ in range(3)]
        await asyncio.gather(*map(collect, streams))

    assert len(fake.session_messages) == 4


@pytest.mark.parametrize("error", [None, DomainError("STREAM_NOT_READ", "it held too much")])
async def test_session_continues_all_requests_when_its_stream_breaks(
    client: AsyncClient, fake: FakeScheduler, error: DomainError | None
) -> None:
    fake.before_token = cut_at(7, 13, error=error)  # type: ignore[assignment]

    async with client.session() as session:
        streams = [session.submit([n], SamplingParams(seed=n, max_tokens=8)) for n in range(4)]
        results = await asyncio.gather(*map(collect, streams))

    for number, (token_ids, _) in enumerate(results):
        assert token_ids == expected_tokens([number], number, 8)


async def test_session_fails_one_request_when_the_server_rejects_it(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    def before_request(request: object) -> None:
        if not request.prompt_token_ids:  # type: ignore[attr-defined]
            raise DomainError("PROMPT_EMPTY", "no prompt")

    fake.before_request = before_request

    async with client.session() as session:
        good = session.submit([1], SamplingParams(seed=1, max_tokens=3))
        bad = session.submit([], SamplingParams(max_tokens=3))
        with pytest.raises(InvalidRequest, match="no prompt"):
            await collect(bad)
        token_ids, _ = await collect(good)

    assert token_ids == expected_tokens([1], 1, 3)


async def test_session_submits_again_when_a_successor_is_not_up_yet(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.before_token = cut_at(2)  # type: ignore[assignment]

    def before_request(request: object) -> None:
        if len(fake.requests) in (2, 3):
            raise DomainError("MODEL_NOT_READY", "not yet")

    fake.before_request = before_request

    async with client.session() as session:
        token_ids, _ = await collect(session.submit([9], SamplingParams(seed=3, max_tokens=5)))

    assert token_ids == expected_tokens([9], 3, 5)


def cut_now() -> None:
    raise Cut


def num_submitted(fake: FakeScheduler, prompt: int) -> int:
    return sum(list(request.prompt_token_ids) == [prompt] for request in fake.requests)


@pytest.mark.parametrize("is_left", [False, True])
async def test_session_request_is_not_resumed_when_stream_breaks_after_abort(
    client: AsyncClient, fake: FakeScheduler, is_left: bool
) -> None:
    def before_token(number: int) -> None:
        if number == 4:
            fake.hold = asyncio.Event()

    def before_request(request: object) -> None:
        if len(fake.requests) > 2:
            fake.hold = None

    fake.before_token, fake.before_request = before_token, before_request
    fake.before_abort = cut_now

    async with client.session() as session:
        aborted = session.submit([2], SamplingParams(seed=2, max_tokens=8))
        good = session.submit([1], SamplingParams(seed=1, max_tokens=8))
        await anext(aborted)
        if is_left:
            aborted.close()
        else:
            aborted.abort()
            aborted.abort()
        token_ids, _ = await collect(good)
        rest = [event async for event in aborted]

    assert token_ids == expected_tokens([1], 1, 8)
    assert num_submitted(fake, 2) == 1
    if is_left:
        assert rest == []
    else:
        assert isinstance(rest[-1], Finish)
        assert rest[-1].reason is FinishReason.ABORTED


async def test_session_request_is_not_resumed_when_aborted_without_stream(
    client: AsyncClient, fake: FakeScheduler, virtual_time: VirtualTime
) -> None:
    cuts: list[int] = []

    def cut(number: int) -> None:
        if number >= 3 and len(fake.requests) == 2 and not cuts:
            cuts.append(number)
            raise Cut

    async def before_wake() -> None:
        aborted.abort()

    fake.before_token = cut
    virtual_time.before_wake = before_wake

    async with client.session() as session:
        good = session.submit([1], SamplingParams(seed=1, max_tokens=5))
        aborted = session.submit([2], SamplingParams(seed=2, max_tokens=5))
        token_ids, _ = await collect(good)
        _, finish = await collect(aborted)

    assert token_ids == expected_tokens([1], 1, 5)
    assert finish.reason is FinishReason.ABORTED
    assert num_submitted(fake, 2) == 1


async def test_session_request_is_not_resumed_when_aborted_before_resumption(
    client: AsyncClient, fake: FakeScheduler, virtual_time: VirtualTime
) -> None:
    def before_request(request: object) -> None:
        if len(fake.requests) == 2:
            raise DomainError("QUEUE_FULL", "not now")

    async def before_wake() -> None:
        if len(fake.requests) == 2:
            aborted.abort()

    fake.before_token = cut_at(1)  # type: ignore[assignment]
    fake.before_request = before_request
    virtual_time.before_wake = before_wake

    async with client.session() as session:
        aborted = session.submit([2], SamplingParams(seed=2, max_tokens=5))
        _, finish = await collect(aborted)
        await collect(session.submit([1], SamplingParams(seed=1, max_tokens=5)))

    assert finish.reason is FinishReason.ABORTED
    assert num_submitted(fake, 2) == 2


async def test_session_request_has_its_own_patience(
    address: str, fake: FakeScheduler, virtual_time: VirtualTime
) -> None:
    late: list[tuple[float, SessionRequest]] = []

    async def before_wake() -> None:
        if virtual_time.now_s > 108 and not late:
            late.append((virtual_time.now_s, session.submit([2], SamplingParams(max_tokens=3))))

    fake.before_token = cut_at(*range(1000))  # type: ignore[assignment]
    virtual_time.before_wake = before_wake

    async with (
        AsyncClient(address, virtual_time.config(give_up_after_s=10)) as client,
        client.session() as session,
    ):
        with pytest.raises(ServerUnreachable):
            await collect(session.submit([1], SamplingParams(seed=1, max_tokens=3)))
        ((submitted_at, request),) = late
        with pytest.raises(ServerUnreachable):
            await collect(request)

    assert virtual_time.now_s - submitted_at > 7


async def test_session_aborts_what_is_unfinished_when_it_is_left(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.hold = asyncio.Event()

    async with client.session() as session:
        stream = session.submit([1], SamplingParams(max_tokens=100))

    _, finish = await collect(stream)
    assert finish.reason is FinishReason.ABORTED


async def test_session_fails_its_requests_but_stays_usable_when_patience_ends(
    address: str, fake: FakeScheduler, virtual_time: VirtualTime
) -> None:
    fake.before_token = cut_at(*range(1000))  # type: ignore[assignment]

    async with (
        AsyncClient(address, virtual_time.config(give_up_after_s=10)) as client,
        client.session() as session,
    ):
        with pytest.raises(ServerUnreachable):
            await collect(session.submit([1], SamplingParams(seed=1, max_tokens=3)))
        fake.before_token = lambda number: None
        token_ids, _ = await collect(session.submit([2], SamplingParams(seed=1, max_tokens=3)))

    assert token_ids == expected_tokens([2], 1, 3)


async def test_session_serves_others_when_one_request_is_unread(
    client: AsyncClient,
) -> None:
    async with client.session() as session:
        unread = session.submit([1], SamplingParams(seed=1, max_tokens=500))
        for number in range(2, 5):
            params = SamplingParams(seed=number, max_tokens=500)
            token_ids, _ = await collect(session.submit([number], params))
            assert token_ids == expected_tokens([number], number, 500)
        token_ids, _ = await collect(unread)

    assert token_ids == expected_tokens([1], 1, 500)


async def test_session_fails_one_request_when_it_is_too_large(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.max_message_bytes = 300_000

    async with client.session() as session:
        good = session.submit([1], SamplingParams(seed=1, max_tokens=3))
        large = session.submit([2] * 300_000, SamplingParams(max_tokens=3))
        with pytest.raises(InvalidRequest) as caught:
            await collect(large)
        token_ids, _ = await collect(good)
        # Large, but not too large.
        assert await collect(session.submit([3] * 290_000, SamplingParams(max_tokens=3)))

    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert token_ids == expected_tokens([1], 1, 3)
    assert [len(request.prompt_token_ids) for request in fake.requests] == [1, 290_000]


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
async def test_session_stays_usable_when_its_stream_raises(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async with Streams(break_at_first(error), finish_each).session() as session:
        reading = [collect(session.submit([number])) for number in range(2)]
        ends = await within_patience(asyncio.gather(*reading, return_exceptions=True))
        assert [type(end) for end in ends] == [SplitserveError, SplitserveError]
        assert await is_finished(session)
    assert [record.getMessage() for record in caplog.records] == ["session_broken"]


async def test_session_fails_requests_of_a_left_stream_when_it_raises() -> None:
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
