"""Whether somebody listens, by real sockets."""

from __future__ import annotations

import asyncio
import socket

import pytest

from scheduler_service.executors.executor_link import is_refused
from tests.support.processes.addresses import reserve_address


def listener(family: socket.AddressFamily, host: str) -> socket.socket:
    """Raises OSError where the machine has no such addresses."""
    listening = socket.socket(family)
    try:
        listening.bind((host, 0))
    except OSError:
        listening.close()
        raise
    listening.listen()
    return listening


async def test_address_refuses_when_nobody_listens() -> None:
    assert await is_refused(reserve_address())


async def test_address_does_not_refuse_when_somebody_listens() -> None:
    with listener(socket.AF_INET, "127.0.0.1") as listening:
        assert not await is_refused(f"127.0.0.1:{listening.getsockname()[1]}")


async def test_name_does_not_refuse_when_somebody_listens_at_one_of_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusing = reserve_address().rpartition(":")
    with listener(socket.AF_INET, "127.0.0.1") as listening:
        ports = [int(refusing[2]), listening.getsockname()[1]]

        async def two_addresses(*_: object, **__: object) -> list[object]:
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in ports
            ]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two_addresses)
        assert not await is_refused("executor:1")
        ports.pop()
        assert await is_refused("executor:1")


async def test_ipv6_address_refuses_when_nobody_listens_any_more() -> None:
    try:
        listening = listener(socket.AF_INET6, "::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    target = f"[::1]:{listening.getsockname()[1]}"
    with listening:
        assert not await is_refused(target)
    assert await is_refused(target)


@pytest.mark.parametrize("error", [TimeoutError(), OSError(113, "no route"), socket.gaierror()])
async def test_address_does_not_refuse_when_it_cannot_be_reached(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(*_: object) -> None:
        raise error

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", connect)
    assert not await is_refused("127.0.0.1:1")


@pytest.mark.parametrize("target", ["127.0.0.1", "127.0.0.1:", "host name:x"])
async def test_address_does_not_refuse_when_it_is_none(target: str) -> None:
    assert not await is_refused(target)
