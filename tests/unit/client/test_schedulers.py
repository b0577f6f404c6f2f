"""Choice of a scheduler while schedulers come and go; health probes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc_health.v1 import health_pb2

from splitserve_client import (
    MAX_AT_ONCE,
    Answers,
    Channels,
    CredentialsUnusable,
    Draining,
    Schedulers,
    ServerUnreachable,
    Stubs,
    ask,
    schedulers,
)

SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
NOT_SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulers, "_PACE_S", 3600.0)


class _Network:
    """Schedulers by name, and the discovery that tells of them."""

    host: str | None = None

    def __init__(self, *addresses: str) -> None:
        self.known = addresses
        self.refusing: set[str] = set()
        self.silent: set[str] = set()
        self.idle: set[str] = set()
        self.was_asked = asyncio.Event()
        self.unusable: set[str] = set()
        self.num_probes: Counter[str] = Counter()
        self.now_s = 1.0
        self.schedulers = Schedulers(self, self._open, lambda: self.now_s, lambda addresses: None)

    def _open(self, address: str) -> Channels:
        if address in self.unusable:
            raise CredentialsUnusable("no key")
        return cast(Channels, _Channels(address, self))

    async def addresses(self) -> tuple[str, ...]:
        return self.known

    def pass_time(self) -> None:
        """What is known is old."""
        self.now_s += 100.0

    async def call(self) -> str:
        async with self.schedulers.call(1.0) as stubs:
            return cast(Any, stubs).address  # type: ignore[no-any-return]


class _Channels:
    is_ready = True
    is_used = False

    def __init__(self, address: str, network: _Network) -> None:
        self._network = network
        self._is_closed = False
        health = SimpleNamespace(Check=self._check)
        self._stubs = SimpleNamespace(address=address, health=health)

    def has(self, stubs: object) -> bool:
        return stubs is self._stubs

    async def close(self) -> None:
        self._is_closed = True
        await _others()

    @asynccontextmanager
    async def call(self, timeout_s: float) -> AsyncGenerator[SimpleNamespace, None]:
        assert not self._is_closed, "nobody is to call what is closed"
        await _others()
        if self._stubs.address in self._network.refusing:
            raise ServerUnreachable(f"{self._stubs.address} refuses")
        yield self._stubs

    async def _check(self, _: object, timeout: float) -> health_pb2.HealthCheckResponse:  # noqa: ASYNC109
        self._network.num_probes[self._stubs.address] += 1
        self._network.was_asked.set()
        if self._stubs.address in self._network.silent:
            await asyncio.Future()
        await _others()
        return NOT_SERVING if self._stubs.address in self._network.idle else SERVING


async def _others() -> None:
    """Lets them do what they can."""
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (("a:1", "b:1", "c:1"), ("d:1",), "d:1"),
        (("a:1", "b:1", "c:1", "e:1"), ("a:1",), "a:1"),
    ],
)
async def test_calls_at_once_find_a_scheduler_when_others_are_gone(
    before: tuple[str, ...], after: tuple[str, ...], expected: str
) -> None:
    network = _Network(*before)
    # Each is known by now.
    for address in reversed(before):
        network.refusing = set(before) - {address}
        network.pass_time()
        assert await network.call() == address
    network.refusing.clear()
    network.known = after
    for _ in range(3):
        network.pass_time()
        assert await asyncio.gather(*(network.call() for _ in range(4))) == [expected] * 4


async def test_calls_at_once_look_once() -> None:
    network = _Network("a:1", "b:1")
    await asyncio.gather(*(network.call() for _ in range(10)))
    assert network.num_probes == {"a:1": 1}


async def test_calls_go_on_when_a_new_scheduler_is_unusable() -> None:
    network = _Network("a:1")
    await network.call()
    network.known, network.refusing, network.unusable = ("a:1", "x:1", "b:1"), {"a:1"}, {"x:1"}
    network.pass_time()
    assert await network.call() == "b:1"


async def test_calls_end_when_the_client_is_closed_while_it_looks() -> None:
    network = _Network("a:1")
    network.silent = {"a:1"}
    calls = [asyncio.create_task(network.call()) for _ in range(3)]
    await network.was_asked.wait()
    await network.schedulers.close()
    for call in calls:
        with pytest.raises(ServerUnreachable, match="closed"):
            await call


async def test_others_go_on_when_who_looked_first_is_cancelled() -> None:
    network = _Network("a:1")
    first, second = (asyncio.create_task(network.call()) for _ in range(2))
    await network.was_asked.wait()
    first.cancel()
    assert await second == "a:1"
    assert first.cancelled()


async def test_problem_is_told_when_the_only_scheduler_cannot_be_used() -> None:
    network = _Network("a:1")
    network.unusable = {"a:1"}
    with pytest.raises(CredentialsUnusable):
        await network.call()


async def test_silent_stream_stays_when_no_scheduler_answers() -> None:
    network = _Network("a:1", "b:1")
    async with network.schedulers.call(1.0) as stubs:
        network.refusing = {"a:1", "b:1"}
        assert not await network.schedulers.elsewhere(stubs)


async def test_silent_stream_moves_when_another_scheduler_serves() -> None:
    network = _Network("a:1", "b:1")
    stubs: Stubs
    async with network.schedulers.call(1.0) as stubs:
        assert not await network.schedulers.elsewhere(stubs)
        network.refusing = {"a:1"}
        assert await network.schedulers.elsewhere(stubs)


async def test_silent_scheduler_is_asked_last_when_another_serves() -> None:
    network = _Network("a:1", "b:1")
    async with network.schedulers.call(1.0) as stubs:
        network.silent = {"a:1"}
        # Nobody waits for an answer of it.
        assert await network.schedulers.elsewhere(stubs, is_silent=True)
        network.pass_time()
        assert await network.call() == "b:1"
        # It answers again, and is as good as any.
        network.silent, network.known = set(), ("a:1",)
        network.pass_time()
        assert await network.call() == "a:1"


async def test_scheduler_that_stops_is_left_though_no_other_serves_yet() -> None:
    network = _Network("a:1", "b:1")
    assert await network.call() == "a:1"
    network.idle = {"a:1", "b:1"}
    network.pass_time()
    assert await network.call() == "a:1"
    with pytest.raises(Draining):
        async with network.schedulers.call(1.0):
            raise Draining("it stops", "DRAINING")
    assert await network.call() == "b:1"
    # If it is the only one, it is asked even so.
    network.known = ("a:1",)
    network.pass_time()
    assert await network.call() == "a:1"


class _Schedulers:
    """They answer when the test says so."""

    def __init__(self, count: int) -> None:
        self.answers = {f"10.0.0.{n}:1": asyncio.Future[bool]() for n in range(count)}
        self.asked: list[str] = []
        self.num_waiting = 0
        self._has_asked = asyncio.Event()

    async def is_serving(self, address: str) -> bool:
        self.asked.append(address)
        self._has_asked.set()
        self.num_waiting += 1
        try:
            return await asyncio.shield(self.answers[address])
        finally:
            self.num_waiting -= 1

    async def until_asked(self, count: int) -> None:
        while len(self.asked) < count:
            self._has_asked.clear()
            await self._has_asked.wait()


async def test_few_are_waited_for_at_a_time_when_none_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedulers, "_PACE_S", 0.0)
    many, answers = _Schedulers(64), Answers()
    asking = asyncio.create_task(ask(many.answers, many.is_serving, answers))
    await many.until_asked(MAX_AT_ONCE)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(many.asked) == many.num_waiting == MAX_AT_ONCE
    # One that does not answer in time makes room for the next.
    many.answers[many.asked[0]].set_exception(ServerUnreachable("silent"))
    await many.until_asked(MAX_AT_ONCE + 1)
    many.answers[many.asked[-1]].set_result(True)
    await asking
    assert answers.serving == many.asked[-1]
    assert len(many.asked) == MAX_AT_ONCE + 1
    assert many.num_waiting == 0, "nobody waits for what nobody needs"


async def test_one_is_asked_when_it_answers() -> None:
    many, answers = _Schedulers(8), Answers()
    next(iter(many.answers.values())).set_result(True)
    await ask(many.answers, many.is_serving, answers)
    assert many.asked == [answers.serving]


async def test_next_is_probed_at_once_when_one_refuses_or_idles() -> None:
    many, answers = _Schedulers(4), Answers()
    refusing, first_idle, idle, serving = many.answers.values()
    refusing.set_exception(ServerUnreachable("refused"))
    first_idle.set_result(False)
    idle.set_result(False)
    serving.set_result(True)
    await ask(many.answers, many.is_serving, answers)
    assert many.asked == list(many.answers)
    assert (answers.idle, answers.serving) == (many.asked[1], many.asked[3])
    assert str(answers.problem) == "refused"
