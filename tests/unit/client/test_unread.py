from __future__ import annotations

import asyncio

import pytest

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client import (
    AsyncClient,
    Finish,
    SamplingParams,
    SessionRequest,
    StreamNotRead,
    Tokens,
    UnreadBudget,
    Wakeups,
)
from tests.support.fakes.fake_scheduler import FakeScheduler, expected_tokens
from tests.unit.client.test_client import collect


class Opened:
    """A request and how often it was aborted."""

    def __init__(self, unread: UnreadBudget) -> None:
        self.num_aborts = 0
        self.request = SessionRequest("id", unread, self.abort)

    def abort(self) -> None:
        self.num_aborts += 1


def scored(num_top: int) -> api.SessionEvent:
    top = [api.TopLogprob(token_id=i, logprob=-i) for i in range(num_top)]
    logprob = api.TokenLogprob(token_id=5, logprob=-1.5, rank=1, top=top)
    chunk = api.TokenChunk(token_ids=[5], logprobs=[logprob])
    return api.SessionEvent(handle=1, tokens=chunk)


async def test_request_returns_unread_tokens_at_once() -> None:
    budget = UnreadBudget()
    opened = Opened(budget)
    for number in range(300):
        opened.request.put_token(number, response=number + 1)

    first, second = await anext(opened.request), await anext(opened.request)

    assert first == Tokens(tuple(range(256)))
    assert second == Tokens(tuple(range(256, 300)))
    assert budget.num_bytes == 0


async def test_request_keeps_the_order_when_tokens_and_events_are_mixed() -> None:
    request = Opened(UnreadBudget()).request
    request.put_token(1, response=1)
    request.put(scored(2), response=2)
    request.put_token(2, response=3)
    request.put(api.SessionEvent(finish=api.Finish(reason=api.FINISH_REASON_STOP)), response=3)

    events = [event async for event in request]

    assert [e.token_ids if isinstance(e, Tokens) else None for e in events] == [
        (1,),
        (5,),
        (2,),
        None,
    ]
    assert isinstance(events[-1], Finish)


async def test_request_ends_when_it_held_too_much() -> None:
    budget = UnreadBudget(max_bytes=1000)
    opened = Opened(budget)
    # What comes at once may be larger.
    for _ in range(20):
        opened.request.put(scored(20), response=1)
    assert budget.num_bytes > 1000
    assert opened.num_aborts == 0

    opened.request.put(scored(20), response=2)

    assert opened.num_aborts == 1
    assert budget.num_bytes == 0
    with pytest.raises(StreamNotRead):
        await anext(opened.request)
    with pytest.raises(StopAsyncIteration):
        await anext(opened.request)


def test_the_largest_goes_when_all_together_hold_too_much() -> None:
    budget = UnreadBudget(max_bytes=1000)
    requests = [Opened(budget) for _ in range(40)]
    for number, opened in enumerate(requests):
        for _ in range(8 if number == 7 else 2):
            opened.request.put(scored(20), response=1)
    before = budget.num_bytes

    budget.enforce()

    assert before > budget.max_total_bytes >= budget.num_bytes
    assert requests[7].num_aborts == 1
    # No more of the others than it takes.
    largest = max(opened.request.num_unread_bytes for opened in requests)
    assert budget.num_bytes + largest > budget.max_total_bytes


async def test_session_aborts_a_request_when_unread_beyond_budget(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    budget = UnreadBudget(max_bytes=10_000)
    async with client.session(budget) as session:
        params = SamplingParams(seed=1, max_tokens=2000, num_logprobs=20)
        unread = session.submit([1], params)
        read = session.submit([2], SamplingParams(seed=2, max_tokens=3000))
        token_ids, _ = await collect(read)
        with pytest.raises(StreamNotRead):
            await collect(unread)

    assert token_ids == expected_tokens([2], 2, 3000)
    assert budget.num_bytes == 0


class Woken:
    def __init__(self) -> None:
        self.times: list[int] = []
        self.num_responses = 0

    def wake(self) -> None:
        self.times.append(self.num_responses)


async def test_readers_are_woken_together_when_slow() -> None:
    loop = asyncio.get_running_loop()
    wakeups, reader = Wakeups(), Woken()
    clock = [loop.time()]
    loop.time = lambda: clock[0]  # type: ignore[method-assign]

    async def receive(number: int) -> None:
        reader.num_responses = number
        wakeups.add(reader)
        wakeups.flush()
        clock[0] += 0.05 if number == 1 else 0.01  # the readers, the first time, take that long
        await asyncio.sleep(0)

    for number in (1, 2, 3):
        await receive(number)
    assert reader.times == [1]
    clock[0] += 0.05
    for _ in range(3):
        await asyncio.sleep(0)
    assert reader.times == [1, 3]
