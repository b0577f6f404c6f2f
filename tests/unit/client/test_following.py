"""Schedulers that a client follows to when another scheduler names them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest

from splitserve_client import (
    MAX_HOPS,
    AsyncClient,
    ClientConfig,
    Connection,
    Draining,
    RetryPolicy,
    SamplingParams,
    allowed,
    collect_generation,
)
from splitserve_contract import DomainError
from tests.support.fakes.fake_scheduler import FakeScheduler, expected_tokens, start

OWN = "10.0.0.5:50051"
SIBLING, OTHER = "10.0.0.5:50061", "10.0.0.6:50051"


@pytest.mark.parametrize(
    ("named", "has_credential", "is_trusted", "expected"),
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
    named: list[str], has_credential: bool, is_trusted: bool, expected: list[str]
) -> None:
    found = allowed(OWN, named, has_credential=has_credential, is_trusted=is_trusted)
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
    assert allowed(OWN, [f"{host}:80"], has_credential=False, is_trusted=True) == []


def test_client_goes_to_plain_hosts() -> None:
    for host in (
        *("scheduler", "scheduler-2", "scheduler_2", "a.example.", "A.example", "3com.example"),
        *("10a", "10.0.0.6", "[2001:db8::1]", "[::ffff:10.0.0.6]"),
    ):
        named = [f"{host}:80"]
        assert allowed(OWN, named, has_credential=False, is_trusted=True) == named


@pytest.mark.parametrize(
    "secret", [{"api_key": "k" * 32}, {"cluster_token": "t" * 32}], ids=["key", "token"]
)
async def test_no_credential_goes_to_a_host_that_a_scheduler_names(secret: dict[str, str]) -> None:
    draining = Draining("bye")
    draining.schedulers = (OTHER, SIBLING)
    connection = Connection(OWN, ClientConfig(**secret))  # type: ignore[arg-type]
    assert connection.named_schedulers(draining) == [SIBLING]
    await connection.close()


PARAMS = SamplingParams(seed=7, max_tokens=3)
EXPECTED = expected_tokens([3], 7, 3)


def _stop(following: str, _: object) -> None:
    raise DomainError("DRAINING", "it stops", schedulers=(following,))


@asynccontextmanager
async def chain(
    *fakes: FakeScheduler, num_idle: int | None = None
) -> AsyncIterator[tuple[str, ClientConfig]]:
    """The address of the first of schedulers, all but the last of which stop and name the next.

    The first `num_idle`, else all, say that they do not serve.
    """
    async with AsyncExitStack() as stack:
        servers = [await start(fake) for fake in fakes]
        for server in servers:
            stack.push_async_callback(server.server.stop, None)
        for server in servers[:num_idle]:
            await server.set_serving(("",), False)
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        for fake, following in zip(fakes, addresses[1:], strict=False):
            fake.before_request = partial(_stop, following)
        retry = RetryPolicy(first_delay_s=0.001, max_delay_s=0.001)
        yield addresses[0], ClientConfig(retry=retry)


async def test_client_follows_every_hop_when_it_has_many_streams() -> None:
    fakes = [FakeScheduler() for _ in range(MAX_HOPS + 1)]
    async with chain(*fakes, num_idle=1) as (first, config), AsyncClient(first, config) as client:
        completions = await asyncio.gather(*(client.complete([3], PARAMS) for _ in range(4)))
    assert [list(each.token_ids) for each in completions] == [EXPECTED] * 4
    assert len(fakes[-1].requests) == 4


async def test_client_follows_when_the_named_scheduler_does_not_serve_yet() -> None:
    stopping, named = FakeScheduler(), FakeScheduler()
    async with chain(stopping, named) as (first, config):
        for number in range(1, 6):
            async with AsyncClient(first, config) as client:
                await client.complete([3], PARAMS)
            # The first scheduler is not asked again: that would be another hop.
            assert (len(stopping.requests), len(named.requests)) == (number, number)


@pytest.mark.parametrize("in_session", [False, True])
async def test_new_request_waits_when_the_followed_scheduler_has_no_executor(
    in_session: bool,
) -> None:
    refusals = [DomainError("MODEL_NOT_READY", "no executor has registered yet")] * 3

    def refuse(_: object) -> None:
        if refusals:
            raise refusals.pop()

    stopping, named = FakeScheduler(), FakeScheduler()
    async with chain(stopping, named) as (first, config), AsyncClient(first, config) as client:
        await client.complete([3], PARAMS)
        named.before_request = refuse
        if in_session:
            async with client.session() as session:
                generation = await collect_generation(session.submit([3], PARAMS))
        else:
            generation = await client.complete([3], PARAMS)
    assert list(generation.token_ids) == EXPECTED
    assert not refusals


def test_client_on_the_machine_of_its_scheduler_goes_on_there() -> None:
    named = ["127.0.0.1:50061"]
    assert allowed("127.0.0.1:50051", named, has_credential=True, is_trusted=False) == named
