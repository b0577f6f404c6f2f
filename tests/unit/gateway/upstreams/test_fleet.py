"""Choice of a scheduler for each request, and resumption at another one."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest

from splitserve.scheduler.v1.scheduler_pb2 import PoolingInfo
from splitserve_client import (
    ClientConfig,
    CredentialsUnusable,
    Draining,
    ModelNotReady,
    PoolingParams,
    RetryPolicy,
    SamplingParams,
    SchedulingParams,
    ServerUnreachable,
    SplitserveError,
    UnreadBudget,
    collect_vector,
)
from splitserve_common import StaticDiscovery
from splitserve_contract import DomainError
from splitserve_gateway.http import error_of
from splitserve_gateway.upstreams import Fleet, Upstream, UpstreamRequest
from splitserve_gateway.upstreams import fleet as fleet_module
from splitserve_gateway.upstreams import upstream as upstream_module
from tests.support.fakes.fake_scheduler import (
    Cut,
    FakeScheduler,
    expected_tokens,
    start,
    vector_of,
)
from tests.support.fakes.running_schedulers import (
    EXPECTED,
    PARAMS,
    PROMPT,
    Schedulers,
    refuse,
    schedulers,
)

pytestmark = pytest.mark.usefixtures("asked_once")


async def _chosen_and_prepared(running: Schedulers, until: asyncio.Event) -> str:
    """Chooses a scheduler as an endpoint does; then its prompt takes a while."""
    upstream, _ = running.fleet.choose(None)
    await until.wait()
    return upstream.address


@pytest.mark.parametrize("num_idle", [2, 3])
async def test_requests_that_come_at_once_are_spread_over_idle_schedulers(num_idle: int) -> None:
    async with schedulers(num_idle) as running:
        prepared = asyncio.Event()
        prepared.set()
        came = [_chosen_and_prepared(running, prepared) for _ in range(2 * num_idle)]
        chosen = Counter(await asyncio.gather(*came))
        assert chosen == {f"127.0.0.1:{server.port}": 2 for server in running.servers}


async def test_requests_one_after_the_other_take_turns_at_idle_schedulers() -> None:
    async with schedulers(2) as running:
        for _ in range(4):
            assert await running.generate() == EXPECTED
        assert running.num_requests == [2, 2]


async def test_requests_being_prepared_count_as_load() -> None:
    async with schedulers(2) as running:
        first, second = (f"127.0.0.1:{server.port}" for server in running.servers)
        for fake in running.fakes:
            fake.hold = asyncio.Event()
        # The first scheduler has four requests that generate, the second has none.
        running.fleet._upstreams, others = (
            running.fleet._upstreams[:1],
            running.fleet._upstreams[1:],
        )
        generating = [asyncio.create_task(running.generate()) for _ in range(4)]
        await running.until(lambda: running.num_requests == [4, 0])
        running.fleet._upstreams += others

        prepared = asyncio.Event()
        waiting = [asyncio.create_task(_chosen_and_prepared(running, prepared)) for _ in range(8)]
        await asyncio.sleep(0)
        prepared.set()
        assert Counter(await asyncio.gather(*waiting)) == {first: 2, second: 6}
        # Whoever is refused before its tokens are read counts no more.
        await running.until(lambda: [u.num_open for u in running.fleet._upstreams] == [4, 0])
        for fake in running.fakes:
            assert fake.hold is not None
            fake.hold.set()
        assert await asyncio.gather(*generating) == [EXPECTED] * 4
        assert [upstream.num_open for upstream in running.fleet._upstreams] == [0, 0]


def _takes_all(fleet: Fleet, number: int) -> bool:
    return sum(upstream.takes_requests for upstream in fleet.reachable()) == number


async def test_gateways_begin_with_different_schedulers_when_all_are_idle() -> None:
    async with schedulers(2) as running:
        addresses = [upstream.address for upstream in running.fleet._upstreams]
        begun = set()
        for draws in ([0.1, 0.9], [0.9, 0.1]):
            async with Fleet(
                StaticDiscovery(addresses), UnreadBudget(), draw=iter(draws).__next__
            ) as other:
                await Schedulers(other, running.fakes, running.servers).until(
                    partial(_takes_all, other, len(addresses))
                )
                begun.add(other.choose(None)[0].address)
        assert begun == set(addresses)


@pytest.mark.parametrize("reason", ["DRAINING", "MODEL_NOT_READY"])
async def test_request_goes_to_another_scheduler_when_the_first_takes_none(reason: str) -> None:
    async with schedulers(2) as running:
        running.fakes[0].before_request = refuse(reason)
        assert await running.generate() == EXPECTED
        assert running.num_requests == [1, 1]


@pytest.mark.parametrize(
    ("reason", "error"), [("DRAINING", Draining), ("MODEL_NOT_READY", ModelNotReady)]
)
async def test_request_is_refused_when_no_scheduler_takes_any(
    reason: str, error: type[SplitserveError]
) -> None:
    async with schedulers(3) as running:
        for fake in running.fakes:
            fake.before_request = refuse(reason)
        with pytest.raises(error):
            await running.generate()
        # Each was asked once; nobody was asked again and again.
        assert running.num_requests == [1, 1, 1]


async def test_request_fails_when_no_other_scheduler_has_its_adapter() -> None:
    async with schedulers(2) as running:
        first, second = running.fakes
        first.before_request = refuse("DRAINING")
        second.adapter_refusal = "ADAPTER_UNKNOWN"
        upstream, served = running.fleet.choose(None)
        scheduling = SchedulingParams(adapter="formal")
        request = UpstreamRequest(upstream, PROMPT, PARAMS, scheduling, served.model.digest)
        with pytest.raises(ServerUnreachable, match="lacks its adapter"):
            await anext(request.events())
        assert [each.adapter for each in second.requests] == ["formal"]


@pytest.mark.usefixtures("asked_often")
async def test_scheduler_is_left_out_while_it_does_not_serve() -> None:
    async with schedulers(2) as running:
        first = running.addresses_taking()[0]
        await running.servers[0].set_serving(("",), False)
        await running.until(lambda: first not in running.addresses_taking())
        assert await running.generate() == EXPECTED
        assert running.num_requests == [0, 1]

        await running.servers[0].set_serving(("",), True)
        await running.until(lambda: first in running.addresses_taking())
        assert await running.generate() == EXPECTED
        assert running.num_requests == [1, 1]


@pytest.mark.usefixtures("asked_often")
async def test_only_scheduler_is_still_asked_when_it_does_not_serve() -> None:
    async with schedulers(1) as running:
        # Its executor may be back in a moment; it is for the scheduler to say whether it waits.
        await running.servers[0].set_serving(("",), False)
        await running.until(lambda: not running.fleet.is_ready)
        assert await running.generate() == EXPECTED


@pytest.mark.usefixtures("asked_often")
@pytest.mark.parametrize("seed", [7, None])
async def test_stream_moves_when_its_scheduler_stops(
    seed: int | None,
) -> None:
    async with schedulers(2) as running:
        ended = asyncio.Event()
        came: list[int] = []
        first, second = running.fakes

        def end_among(number: int) -> None:
            if number == 3:
                first.hold = asyncio.Event()
            if number == 4:
                first.before_request = refuse("DRAINING")
                ended.set()
                raise DomainError("DRAINING", "the scheduler is shutting down")

        first.before_token = end_among
        generating = asyncio.create_task(running.generate(replace(PARAMS, seed=seed), came))
        # Tokens that the end overtook would not be resumed.
        await running.until(lambda: len(came) == 3)
        assert first.hold is not None
        first.hold.set()
        await ended.wait()
        # By now it is gone, as whoever drains is in the end.
        await running.servers[0].server.stop(None)
        drawn = first.requests[0].sampling_params.seed
        expected = expected_tokens(PROMPT, drawn, len(EXPECTED))
        assert await generating == expected
        (resumed,) = second.requests
        assert resumed.sampling_params.seed == drawn
        known = list(resumed.resume_token_ids)
        assert len(known) >= 3
        assert known == expected[: len(known)]


@pytest.mark.usefixtures("asked_often")
async def test_vector_moves_when_its_scheduler_is_lost() -> None:
    async with schedulers(2) as running:
        info = PoolingInfo(embedding_size=4)
        for fake in running.fakes:
            fake.pooling = info
        first, second = running.fakes
        first.hold = asyncio.Event()
        upstream, served = running.fleet.choose(None)
        params = SamplingParams(pooling=PoolingParams())
        digest = served.model.digest
        request = UpstreamRequest(upstream, PROMPT, params, SchedulingParams(), digest)
        coming = asyncio.create_task(collect_vector(request.events()))
        await running.until(lambda: running.num_requests == [1, 0])
        await running.servers[0].server.stop(None)
        found = await coming
        expected = vector_of(PROMPT, second.requests[0].sampling_params.pooling, info)
        assert found.vector.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("asked_often")
async def test_stream_fails_when_only_another_model_is_left() -> None:
    config = ClientConfig(retry=RetryPolicy(first_delay_s=0.01, give_up_after_s=0.1))
    async with schedulers(2, config, ["aa", "bb"]) as running:
        held = asyncio.Event()
        first, second = running.fakes

        def die_among(number: int) -> None:
            if number == 3:
                held.set()
                raise Cut

        first.before_token = die_among
        generating = asyncio.create_task(running.generate())
        await held.wait()
        await running.servers[0].server.stop(None)
        with pytest.raises(ServerUnreachable) as raised:
            await generating
        assert second.requests == []
        told = error_of(raised.value)
        assert (told.status, told.code) == (503, "server_unreachable")
        assert "127.0.0.1" not in told.message


class _Named:
    """A name whose meaning changes."""

    host: str | None = None

    def __init__(self) -> None:
        self.known: tuple[str, ...] = ()

    async def addresses(self) -> tuple[str, ...]:
        if not self.known:
            raise OSError("no such name")
        return self.known


@pytest.mark.usefixtures("asked_often")
async def test_schedulers_come_and_go_as_discovery_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_LOOK_S", 0.01)
    named = _Named()
    async with AsyncExitStack() as stack:
        fakes = [FakeScheduler(), FakeScheduler()]
        servers = [await start(fake) for fake in fakes]
        for server in servers:
            stack.push_async_callback(server.server.stop, None)
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        # Nothing is known at first.
        fleet = await stack.enter_async_context(Fleet(named, UnreadBudget()))
        running = Schedulers(fleet, fakes, servers)
        assert not fleet.is_ready

        named.known = (addresses[0],)
        await running.until(lambda: running.addresses_taking() == addresses[:1])
        assert await running.generate() == EXPECTED
        named.known = (addresses[1],)
        await running.until(lambda: running.addresses_taking() == addresses[1:])
        assert await running.generate() == EXPECTED
        assert running.num_requests == [1, 1]
        named.known = ()
        assert await running.generate() == EXPECTED


class _Troubled(Upstream):
    """Cannot be entered while it is one of `unusable`, and is left with an error."""

    unusable: ClassVar[set[str]] = set()

    def __init__(self, address: str, *rest: Any) -> None:  # noqa: ANN401
        if address in self.unusable:
            raise CredentialsUnusable("no key")
        super().__init__(address, *rest)

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__(*_)
        raise ServerUnreachable("gone")


@pytest.mark.usefixtures("asked_often")
async def test_schedulers_still_join_when_one_could_not_be_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(fleet_module, "Upstream", _Troubled)
    named = _Named()
    async with AsyncExitStack() as stack:
        fakes = [FakeScheduler(), FakeScheduler(), FakeScheduler()]
        servers = [await start(fake) for fake in fakes]
        for server in servers:
            stack.push_async_callback(server.server.stop, None)
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        named.known = tuple(addresses[:1])
        fleet = await stack.enter_async_context(Fleet(named, UnreadBudget()))
        running = Schedulers(fleet, fakes, servers)

        monkeypatch.setattr(_Troubled, "unusable", {addresses[1]})
        named.known = tuple(addresses)
        await running.until(lambda: running.addresses_taking() == [addresses[0], addresses[2]])
        # Those that leave do it with an error.
        named.known = tuple(addresses[1:])
        await running.until(lambda: running.addresses_taking() == [addresses[2]])
        monkeypatch.setattr(_Troubled, "unusable", set())
        await running.until(lambda: sorted(running.addresses_taking()) == sorted(addresses[1:]))
    unusable = f"upstream_unusable address={addresses[1]} error='no key'"
    assert caplog.messages.count(unusable) == 1
    assert all(
        f"upstream_not_closed address={each} error='gone'" in caplog.messages for each in addresses
    )


@pytest.mark.usefixtures("asked_often")
async def test_request_moves_when_its_scheduler_lost_all_executors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream_module, "_STALLED_S", 0.02)
    async with schedulers(2) as running:
        first = running.addresses_taking()[0]
        running.fakes[0].hold = asyncio.Event()
        generating = asyncio.create_task(running.generate())
        await running.until(lambda: running.num_requests == [1, 0])
        await running.servers[0].set_serving(("",), False)
        assert await generating == EXPECTED
        assert running.num_requests == [1, 1]
        assert first not in running.addresses_taking()
