"""Calls of many at once, while schedulers come, go and are silent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc_health.v1 import health_pb2

from splitserve_client import schedulers
from splitserve_client.channels import Channels, Stubs
from splitserve_client.errors import CredentialsUnusable, Draining, ServerUnreachable
from splitserve_client.schedulers import Schedulers

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


async def test_calls_go_on_when_a_scheduler_that_is_new_cannot_be_used() -> None:
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
