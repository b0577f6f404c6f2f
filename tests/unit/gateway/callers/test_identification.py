"""Identification of callers: credentials, cached answers, and places of tenants."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest
from starlette.types import Message, Receive, Scope, Send

from splitserve_gateway.callers import (
    Caller,
    IdentificationThrottled,
    KnownCallers,
    Memory,
    TenantConcurrency,
    credential_of,
)
from splitserve_gateway.http import ApiError, no_scheduler
from splitserve_gateway.sharing import Shares
from splitserve_gateway.upstreams import Upstream

HOST = (b"host", b"x")


@pytest.mark.parametrize(
    ("value", "credential"),
    [
        (b"Bearer sk-ss-a-b", "sk-ss-a-b"),
        (b"bearer  a.b.c ", "a.b.c"),
        (b"BEARER " + b"a" * 8192, "a" * 8192),
    ],
)
def test_credential_follows_the_scheme(value: bytes, credential: str) -> None:
    assert credential_of([HOST, (b"authorization", value)]) == credential


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ((), "no credential was given"),
        ((b"",), "authorization is invalid"),
        ((b"Bearer",), "authorization is invalid"),
        ((b"Bearer ",), "authorization is invalid"),
        ((b"Basic YTpi",), "authorization is invalid"),
        ((b"Bearer a", b"Bearer a"), "authorization is invalid"),
        ((b"Bearer a", b"Bearer b"), "authorization is invalid"),
        ((b"Bearer a b",), "3 characters; allowed: at most 8192 visible ASCII characters"),
        ((b"Bearer \xc3\xa4",), "2 characters"),
        ((b"Bearer a\x7f",), "2 characters"),
        ((b"Bearer " + b"a" * 8193,), "8193 characters"),
    ],
)
def test_what_cannot_be_a_credential_is_refused(values: tuple[bytes, ...], problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as refused:
        credential_of([HOST, *((b"authorization", value) for value in values)])
    answer = refused.value.response()
    assert (answer.status_code, refused.value.code) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "credential"),
    [
        ([(b"x-api-key", b"a")], "a"),
        ([(b"x-api-key", b"a"), (b"authorization", b"Bearer a")], "a"),
    ],
)
def test_credential_may_be_in_the_header_of_anthropic(
    headers: list[tuple[bytes, bytes]], credential: str
) -> None:
    assert credential_of([HOST, *headers]) == credential


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ([(b"x-api-key", b"")], "x-api-key is invalid"),
        ([(b"x-api-key", b"a"), (b"x-api-key", b"a")], "x-api-key is invalid"),
        ([(b"x-api-key", b"a"), (b"authorization", b"Bearer b")], "the same as in authorization"),
        ([(b"x-api-key", b"a"), (b"authorization", b"Basic a")], "authorization is invalid"),
        ([(b"x-api-key", b"a b")], "3 characters"),
    ],
)
def test_credential_in_two_headers_is_refused_when_they_differ(
    headers: list[tuple[bytes, bytes]], problem: str
) -> None:
    with pytest.raises(ApiError, match=problem):
        credential_of([HOST, *headers])


MEMORY = Memory(
    known_s=5.0, unknown_s=1.0, max_known=2, max_unknown=2, max_lookups=2, max_waiting=0
)


class Reachable:
    """As much of a scheduler as is looked at here."""

    served: object | None = object()
    is_named = True


class Asked:
    """What schedulers would say, and whom they were asked about; `now_s` is the time."""

    def __init__(self, memory: Memory = MEMORY) -> None:
        self.callers: dict[str, Caller | None] = {}
        self.credentials: list[str] = []
        self.now_s = 0.0
        self.answers = asyncio.Event()
        self.answers.set()
        self.is_down = False
        self.delays_s: list[float] = []
        self.num_answers = 1000
        self.known = KnownCallers(self.ask, lambda: self.now_s, memory, self.sleep)

    async def sleep(self, delay_s: float) -> None:
        """Schedulers answer two more after each pause."""
        self.delays_s.append(delay_s)
        await asyncio.sleep(0)
        self.num_answers = 2

    async def ask(self, credential: str) -> Caller | None:
        self.credentials.append(credential)
        await self.answers.wait()
        if not self.num_answers:
            raise IdentificationThrottled(0.5)
        self.num_answers -= 1
        if self.is_down:
            raise no_scheduler()
        return self.callers.get(credential)

    async def status(self, credential: str, origin: str = "") -> int:
        try:
            await self.known.identify(credential, origin)
        except ApiError as error:
            return error.status
        return 200

    def begin(self, credential: str, origin: str = "") -> asyncio.Task[int]:
        return asyncio.create_task(self.status(credential, origin))


async def begun(*tasks: asyncio.Task[int]) -> None:
    """Lets all run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


@pytest.fixture
async def asked() -> Asked:
    made = Asked()
    made.callers = {name: Caller(name) for name in ("a", "b", "c")}
    return made


async def test_caller_is_asked_about_again_when_the_answer_is_old(asked: Asked) -> None:
    for now_s in (0.0, 4.9, 5.0, 9.9):
        asked.now_s = now_s
        assert await asked.status("a") == 200
    assert asked.credentials == ["a", "a"]


async def test_revoked_caller_is_refused_when_the_answer_is_old(asked: Asked) -> None:
    assert await asked.status("a") == 200
    asked.callers["a"] = None
    asked.now_s = 5.0
    assert await asked.status("a") == 401
    # And let in again soon after it was given back.
    asked.callers["a"] = Caller("a")
    asked.now_s = 5.9
    assert await asked.status("a") == 401
    asked.now_s = 6.0
    assert await asked.status("a") == 200
    assert asked.credentials == ["a"] * 3


async def test_caller_is_asked_about_again_when_its_scheduler_is_lost(
    asked: Asked,
) -> None:
    lost = Reachable()
    asked.callers["a"] = Caller("a", upstreams=frozenset([cast("Upstream", lost)]))
    assert await asked.status("a") == 200
    lost.served = None
    joined = asked.callers["a"] = Caller("a", upstreams=frozenset())
    assert await asked.known.identify("a") is joined
    assert asked.credentials == ["a", "a"]


async def test_one_question_serves_all_who_ask_the_same(asked: Asked) -> None:
    asked.answers.clear()
    tasks = [asked.begin("a") for _ in range(10)]
    await begun(*tasks)
    # Whoever asked first leaves.
    tasks[0].cancel()
    asked.answers.set()
    assert await asyncio.gather(*tasks[1:]) == [200] * 9
    assert asked.credentials == ["a"]


async def test_strangers_alone_are_refused_when_many_are_asked_about(
    asked: Asked,
) -> None:
    assert await asked.status("a") == 200
    asked.now_s = 5.0
    asked.answers.clear()
    strangers = [asked.begin(name) for name in ("x", "y")]
    await begun(*strangers)
    assert await asked.status("b") == 503
    known = asked.begin("a")
    again = asked.begin("x")
    await begun(*strangers, known, again)
    asked.answers.set()
    assert await asyncio.gather(*strangers, again, known) == [401, 401, 401, 200]
    assert await asked.status("b") == 200


async def test_caller_is_refused_when_no_scheduler_answers(
    asked: Asked,
) -> None:
    assert await asked.status("a") == 200
    asked.is_down = True
    assert await asked.status("a") == 200
    asked.now_s = 5.0
    assert [await asked.status(name) for name in ("a", "b", "x")] == [503] * 3
    asked.is_down = False
    assert [await asked.status(name) for name in ("a", "b", "x")] == [200, 200, 401]


async def test_memory_is_bounded_and_strangers_evict_no_callers(asked: Asked) -> None:
    for name in ("a", "b", "x", "y", "z"):
        await asked.status(name)
    asked.credentials.clear()
    for name in ("a", "b", "y", "z", "x"):
        await asked.status(name)
    # Of three strangers, the one that came first was forgotten.
    assert asked.credentials == ["x"]
    asked.credentials.clear()
    for name in ("c", "b", "a"):
        await asked.status(name)
    assert asked.credentials == ["c", "a"]


async def test_flood_of_one_origin_hardly_delays_another() -> None:
    asked = Asked(replace(MEMORY, max_waiting=40, patience_s=60.0))
    asked.callers = {"genuine": Caller("genuine")}
    asked.answers.clear()
    flood = [asked.begin(f"guess {number}", "flood") for number in range(100)]
    for _ in range(5):
        await asyncio.sleep(0)
    refused = [task for task in flood if task.done()]
    # Two are asked about; those that wait leave places in the queue.
    assert len(refused) > 100 - 2 - 40
    assert {task.result() for task in refused} == {503}
    genuine = asked.begin("genuine", "elsewhere")
    await begun(genuine)
    asked.answers.set()
    assert await genuine == 200
    assert asked.credentials.index("genuine") <= 3
    assert {await task for task in flood if task not in refused} == {401}


async def test_stranger_waits_no_longer_than_it_has_patience() -> None:
    asked = Asked(replace(MEMORY, max_lookups=1, max_waiting=40, patience_s=0.01))
    asked.callers = {"genuine": Caller("genuine")}
    asked.answers.clear()
    first = asked.begin("guess", "flood")
    await begun(first)
    assert await asked.status("genuine", "elsewhere") == 503
    assert asked.credentials == ["guess"]
    asked.answers.set()
    assert await first == 401
    assert await asked.status("genuine", "elsewhere") == 200


async def test_stranger_is_asked_about_again_when_schedulers_are_busy() -> None:
    asked = Asked(replace(MEMORY, max_waiting=40, patience_s=60.0))
    asked.callers = {"genuine": Caller("genuine")}
    asked.num_answers = 0
    flood = [asked.begin(f"guess {number}", "flood") for number in range(20)]
    assert await asked.status("genuine", "elsewhere") == 200
    assert asked.delays_s[0] == 0.5
    assert {await task for task in flood} == {401}


async def test_stranger_is_refused_when_schedulers_never_have_room() -> None:
    asked = Asked()

    async def ask(credential: str) -> Caller | None:
        asked.credentials.append(credential)
        raise IdentificationThrottled(0.25)

    asked.known = KnownCallers(ask, lambda: 0.0, MEMORY, asked.sleep)
    assert await asked.status("a") == 503
    assert asked.credentials == ["a"] * MEMORY.most_asks
    assert asked.delays_s == [0.25] * (MEMORY.most_asks - 1)


class PlacesOfTenants:
    """Twenty places before an application that answers when it is told to."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.shares = Shares(20)
        self.app = TenantConcurrency(self.answer, self.shares)

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
async def places() -> PlacesOfTenants:
    return PlacesOfTenants()


async def test_tenant_with_many_requests_leaves_places_to_others(places: PlacesOfTenants) -> None:
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


async def test_requests_of_nobody_need_no_place(places: PlacesOfTenants) -> None:
    health = await places.begin(None, 30)
    assert not any(task.done() for task in health)
    assert places.shares.num_held == 0
    places.answers.set()
    assert await asyncio.gather(*health) == [None] * 30
