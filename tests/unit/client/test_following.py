"""Which schedulers a client believes that another one names."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

import pytest

from splitserve_client import (
    AsyncClient,
    ClientConfig,
    Draining,
    ModelNotReady,
    RetryPolicy,
    SamplingParams,
    collect_generation,
)
from splitserve_client.connection import MAX_HOPS, Connection, allowed
from splitserve_rpc.domain_error import DomainError
from tests.support.fakes.fake_generation import expected_tokens
from tests.support.fakes.fake_scheduler import FakeScheduler, start

OWN = "10.0.0.5:50051"
SIBLING, OTHER = "10.0.0.5:50061", "10.0.0.6:50051"


@pytest.mark.parametrize(
    ("named", "has_credential", "is_vouched", "expected"),
    [
        ([OTHER, SIBLING], False, False, [OTHER, SIBLING]),
        # Its key goes to no other host, unless the operator's own authority certifies that.
        ([OTHER, SIBLING], True, False, [SIBLING]),
        ([OTHER, SIBLING], True, True, [OTHER, SIBLING]),
        # Services of the client's own machine, and what clouds tell there.
        (["127.0.0.1:80", "localhost:80", "[::1]:80", "169.254.169.254:80"], False, True, []),
        (["", "x", "10.0.0.6", "10.0.0.6:0x50", "10.0.0.6:99999", "a b:1"], False, True, []),
        ([OTHER] * 3, False, False, [OTHER]),
        ([f"10.0.1.{number}:1" for number in range(20)], False, False,
         [f"10.0.1.{number}:1" for number in range(8)]),
    ],
)  # fmt: skip
def test_client_goes_nowhere_that_it_should_not(
    named: list[str], has_credential: bool, is_vouched: bool, expected: list[str]
) -> None:
    found = allowed(OWN, named, has_credential=has_credential, is_vouched=is_vouched)
    assert found == expected


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0", "[::]", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::ffff:169.254.1.1]",
        "[::ffff:0.0.0.0]", "[fe80::1%eth0]", "[2001:db8::1%eth0]", "[::ffff:7f00%3A1]",
        "127.1", "127.0.0.1.", "0177.0.0.1", "2130706433", "0x7f000001", "0x7f.1", "127.0.0.0x1",
        "LOCALHOST", "localhost.", "x.Localhost", "[localhost]", "%6cocalhost", "l\uff4fcalhost",
        "unix", "unix-abstract", "dns", "vsock", ".", "a..b",
    ],
)  # fmt: skip
def test_client_goes_to_no_name_for_its_own_machine(host: str) -> None:
    assert allowed(OWN, [f"{host}:80"], has_credential=False, is_vouched=True) == []


@pytest.mark.parametrize(
    "host",
    ["scheduler", "scheduler-2", "scheduler_2", "a.example.", "A.example", "3com.example", "10a",
     "10.0.0.6", "[2001:db8::1]", "[::ffff:10.0.0.6]"],
)  # fmt: skip
def test_client_goes_to_plain_hosts(host: str) -> None:
    named = [f"{host}:80"]
    assert allowed(OWN, named, has_credential=False, is_vouched=True) == named


@pytest.mark.parametrize(
    "secret", [{"api_key": "k" * 32}, {"cluster_token": "t" * 32}], ids=["key", "token"]
)
async def test_no_credential_goes_to_a_host_that_a_scheduler_names(secret: dict[str, str]) -> None:
    draining = Draining("bye")
    draining.schedulers = (OTHER, SIBLING)
    connection = Connection(OWN, ClientConfig(**secret))  # type: ignore[arg-type]
    assert connection.places_named(draining) == [SIBLING]
    await connection.close()


async def test_client_follows_as_often_as_schedulers_stop_when_it_has_many_streams() -> None:
    async with AsyncExitStack() as stack:
        fakes = [FakeScheduler() for _ in range(MAX_HOPS + 1)]
        servers = [await start(fake) for fake in fakes]
        for server in servers:
            stack.push_async_callback(server.server.stop, None)
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        # All but the last one stop, and name the next.
        await servers[0].set_serving(("",), False)
        for fake, following in zip(fakes, addresses[1:], strict=False):
            fake.before_request = partial(_stop, following)
        config = ClientConfig(retry=RetryPolicy(first_delay_s=0.001, max_delay_s=0.001))
        client = await stack.enter_async_context(AsyncClient(addresses[0], config))
        params = SamplingParams(seed=7, max_tokens=3)
        completions = await asyncio.gather(*(client.complete([3], params) for _ in range(4)))
        assert [list(each.token_ids) for each in completions] == [expected_tokens([3], 7, 3)] * 4
        assert len(fakes[-1].requests) == 4


async def test_client_follows_when_nobody_serves_yet_where_it_goes() -> None:
    async with AsyncExitStack() as stack:
        stopping, named = FakeScheduler(), FakeScheduler()
        servers = [await start(fake) for fake in (stopping, named)]
        for server in servers:
            stack.push_async_callback(server.server.stop, None)
            await server.set_serving(("",), False)
        first, following = (f"127.0.0.1:{server.port}" for server in servers)
        stopping.before_request = partial(_stop, following)
        config = ClientConfig(retry=RetryPolicy(first_delay_s=0.001, max_delay_s=0.001))
        for number in range(1, 6):
            async with AsyncClient(first, config) as client:
                await client.complete([3], SamplingParams(seed=7, max_tokens=3))
            # It is not asked again: that would be another hop.
            assert (len(stopping.requests), len(named.requests)) == (number, number)


@pytest.mark.parametrize("in_session", [False, True])
async def test_new_request_waits_where_its_client_has_gone_when_no_executor_is_there_yet(
    in_session: bool,
) -> None:
    async with AsyncExitStack() as stack:
        stopping, named = FakeScheduler(), FakeScheduler()
        servers = [await start(fake) for fake in (stopping, named)]
        for server in servers:
            stack.push_async_callback(server.server.stop, None)
            await server.set_serving(("",), False)
        first, following = (f"127.0.0.1:{server.port}" for server in servers)
        stopping.before_request = partial(_stop, following)
        config = ClientConfig(retry=RetryPolicy(first_delay_s=0.001, max_delay_s=0.001))
        client = await stack.enter_async_context(AsyncClient(first, config))
        params = SamplingParams(seed=7, max_tokens=3)
        await client.complete([3], params)

        refusals = [DomainError("MODEL_NOT_READY", "no executor has registered yet")] * 3

        def refuse(_: object) -> None:
            if refusals:
                raise refusals.pop()

        named.before_request = refuse
        if in_session:
            session = await stack.enter_async_context(client.session())
            generation = await collect_generation(session.submit([3], params))
        else:
            generation = await client.complete([3], params)
        assert list(generation.token_ids) == expected_tokens([3], 7, 3)
        assert not refusals


async def test_new_request_is_refused_when_its_only_scheduler_has_no_executor() -> None:
    async with AsyncExitStack() as stack:
        fake = FakeScheduler()
        server = await start(fake)
        stack.push_async_callback(server.server.stop, None)

        def refuse(_: object) -> None:
            raise DomainError("MODEL_NOT_READY", "no executor has registered yet")

        fake.before_request = refuse
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{server.port}"))
        with pytest.raises(ModelNotReady):
            await client.complete([3], SamplingParams(max_tokens=3))


def _stop(following: str, _: object) -> None:
    raise DomainError("DRAINING", "it stops", schedulers=(following,))


def test_client_on_the_machine_of_its_scheduler_goes_on_there() -> None:
    named = ["127.0.0.1:50061"]
    assert allowed("127.0.0.1:50051", named, has_credential=True, is_vouched=False) == named
