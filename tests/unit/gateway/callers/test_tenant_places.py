"""One tenant's requests leave places to others'."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from splitserve_gateway.callers.caller import Caller
from splitserve_gateway.callers.identification import TenantPlaces
from splitserve_gateway.http.errors import ApiError
from splitserve_gateway.sharing.turns import Shares


class Places:
    """Twenty of them before an application that answers when it is told to."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.shares = Shares(20)
        self.app = TenantPlaces(self.answer, self.shares)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        assert callable(receive)
        assert callable(send)
        await self.answers.wait()

    async def request(self, caller: Caller | None) -> None:
        async def receive() -> Message:
            return {}

        async def send(message: Message) -> None:
            assert message

        state = {} if caller is None else {"caller": caller}
        await self.app({"type": "http", "state": state}, receive, send)

    async def begin(self, caller: Caller | None, num: int) -> list[asyncio.Task[None]]:
        """Those of `num` requests that were let in or refused by now."""
        tasks = [asyncio.create_task(self.request(caller)) for _ in range(num)]
        await asyncio.sleep(0)
        return tasks


@pytest.fixture
async def places() -> Places:
    return Places()


async def test_tenant_with_many_requests_leaves_places_to_others(places: Places) -> None:
    greedy = await places.begin(Caller("key 1", tenant="a"), 10)
    # Another key of the same tenant is no way round.
    greedy += await places.begin(Caller("key 2", tenant="a"), 20)
    refused = [task for task in greedy if task.done()]
    assert places.shares.num_held in range(15, 20)
    assert len(refused) == 30 - places.shares.num_held
    for task in refused:
        error = task.exception()
        assert isinstance(error, ApiError)
        assert (error.status, error.code) == (429, "too_many_requests")
        assert error.retry_after_s
    (other,) = await places.begin(Caller("key 3", tenant="b"), 1)
    assert not other.done()
    places.answers.set()
    await asyncio.gather(other, *(task for task in greedy if task not in refused))
    assert places.shares.num_held == 0


async def test_requests_of_nobody_need_no_place(places: Places) -> None:
    health = await places.begin(None, 30)
    assert not any(task.done() for task in health)
    assert places.shares.num_held == 0
    places.answers.set()
    assert await asyncio.gather(*health) == [None] * 30
