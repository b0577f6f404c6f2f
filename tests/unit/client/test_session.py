from __future__ import annotations

import asyncio

import pytest

from splitserve_client import (
    AsyncClient,
    Finish,
    FinishReason,
    InvalidRequest,
    SamplingParams,
    ServerUnreachable,
    SessionRequest,
    Tokens,
)
from splitserve_rpc.domain_error import DomainError
from tests.support.fakes.fake_generation import expected_tokens
from tests.support.fakes.fake_scheduler import Cut, FakeScheduler
from tests.unit.client.conftest import VirtualTime
from tests.unit.client.test_client import collect, cut_at


async def test_session_keeps_requests_apart_when_many_run_at_once(client: AsyncClient) -> None:
    async with client.session() as session:
        streams = [
            session.submit([1, n], SamplingParams(seed=n, max_tokens=5 + n)) for n in range(20)
        ]
        results = await asyncio.gather(*map(collect, streams))

    for number, (token_ids, finish) in enumerate(results):
        assert token_ids == expected_tokens([1, number], number, 5 + number)
        assert finish.reason is FinishReason.LENGTH


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


async def test_session_continues_all_requests_when_its_stream_breaks(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.before_token = cut_at(7, 13)  # type: ignore[assignment]

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


async def test_session_delivers_scores_when_a_request_asks_for_them(client: AsyncClient) -> None:
    params = SamplingParams(seed=1, max_tokens=2, num_logprobs=1)

    async with client.session() as session:
        events = [event async for event in session.submit([1, 2], params)]

    scores = [s.token_id for e in events if isinstance(e, Tokens) for s in e.logprobs]
    assert scores == expected_tokens([1, 2], 1, 2)


async def test_session_request_finishes_as_aborted_when_it_is_aborted(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.hold = asyncio.Event()

    async with client.session() as session:
        stream = session.submit([1], SamplingParams(max_tokens=100))
        stream.abort()
        _, finish = await collect(stream)
        stream.abort()

    assert finish.reason is FinishReason.ABORTED


def cut_now() -> None:
    raise Cut


def num_submitted(fake: FakeScheduler, prompt: int) -> int:
    return sum(list(request.prompt_token_ids) == [prompt] for request in fake.requests)


@pytest.mark.parametrize("is_left", [False, True])
async def test_session_request_is_not_resumed_when_the_stream_breaks_right_after_its_abort(
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


async def test_session_request_is_not_resumed_when_it_is_aborted_while_there_is_no_stream(
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


async def test_session_request_is_not_resumed_when_it_is_aborted_while_it_waits_for_that(
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


async def test_session_request_has_the_whole_patience_when_others_have_used_up_theirs(
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


async def test_session_continues_all_requests_when_it_was_not_read(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    error = DomainError("STREAM_NOT_READ", "the stream held too much")
    fake.before_token = cut_at(7, error=error)  # type: ignore[assignment]

    async with client.session() as session:
        streams = [session.submit([n], SamplingParams(seed=n, max_tokens=8)) for n in range(4)]
        results = await asyncio.gather(*map(collect, streams))

    for number, (token_ids, _) in enumerate(results):
        assert token_ids == expected_tokens([number], number, 8)


async def test_session_brings_the_others_all_when_one_request_is_not_read(
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


async def test_session_fails_one_request_when_it_is_larger_than_the_server_takes(
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
