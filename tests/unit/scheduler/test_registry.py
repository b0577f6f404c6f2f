"""Tests registrations: bounds for a host, and where executors are dialled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from scheduler_service.config import SchedulerServiceConfig
from scheduler_service.driver import Driver
from scheduler_service.service import (
    MAX_PENDING_OF_A_HOST,
    ExecutorAddresses,
    RegistryServicer,
    Resolver,
)
from splitserve.scheduler.v1 import registry_pb2
from splitserve_common import AddressRules
from splitserve_contract import DomainError
from splitserve_options import options
from tests.support.core.machines import Machine
from tests.support.processes.patience import PATIENCE_S


class _Cluster:
    """Executors answer when `answers` is set."""

    scheduler_epoch = 1

    def __init__(self) -> None:
        self.answers = asyncio.Event()

    async def join(self, _info: object, _target: str) -> None:
        await self.answers.wait()


@dataclass
class _Call:
    host: str
    port: int

    def peer(self) -> str:
        return f"ipv4:{self.host}:{self.port}"


async def test_registration_is_refused_when_its_host_has_too_many() -> None:
    cluster = _Cluster()
    servicer = RegistryServicer(cast("Driver", cluster), ExecutorAddresses(AddressRules()))

    def register(host: str, port: int) -> Any:  # noqa: ANN401
        request = registry_pb2.RegisterRequest(executor=Machine(f"{host}:{port}").info)
        return servicer.Register(request, cast("Any", _Call(host, port)))

    numbers = range(1, MAX_PENDING_OF_A_HOST + 1)
    pending = [asyncio.ensure_future(register("127.0.0.1", number)) for number in numbers]
    await asyncio.sleep(0)
    with pytest.raises(DomainError) as refusal:
        await asyncio.wait_for(register("127.0.0.1", 9), PATIENCE_S)
    assert refusal.value.reason == "REGISTRY_BUSY"
    assert refusal.value.retry_delay_s == 1.0

    other = asyncio.ensure_future(register("127.0.0.2", 1))
    cluster.answers.set()
    assert (await other).scheduler_epoch == 1
    await asyncio.gather(*pending)
    assert (await register("127.0.0.1", 9)).scheduler_epoch == 1


PEER = "ipv4:10.1.0.7:43210"


class Names:
    """Whatever a name stands for, once: a second look would find the cloud's secrets."""

    def __init__(self, *found: str) -> None:
        self.found = found
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        if not self.found:
            raise OSError("no such name")
        return self.found if len(self.asked) == 1 else ["169.254.169.254"]


@pytest.mark.parametrize(
    ("address", "peer", "found", "target"),
    [
        ("10.1.0.7:50052", PEER, (), "10.1.0.7:50052"),
        ("127.0.0.1:50052", "ipv4:127.0.0.1:1", (), "127.0.0.1:50052"),
        ("[::1]:50052", "ipv6:%5B::1%5D:1", (), "[::1]:50052"),
        ("[fd00::5]:50052", "ipv6:%5Bfd00::5%5D:1", (), "[fd00::5]:50052"),
        ("127.0.0.1:50052", "unix:", (), "127.0.0.1:50052"),
        ("10.1.0.7:50052", "ipv6:%5B::ffff:10.1.0.7%5D:1", (), "10.1.0.7:50052"),
        ("executor:50052", PEER, ("10.1.0.9", "10.1.0.7"), "10.1.0.7:50052"),
        ("localhost:50052", "ipv4:127.0.0.1:1", ("::1", "127.0.0.1"), "127.0.0.1:50052"),
    ],
)
async def test_executor_is_dialled_where_it_registers_from(
    address: str, peer: str, found: tuple[str, ...], target: str
) -> None:
    names = Names(*found)
    assert await ExecutorAddresses(AddressRules(), names).target(address, peer) == target
    assert len(names.asked) == bool(found)


@pytest.mark.parametrize(
    ("address", "found", "problem"),
    [
        ("169.254.169.254:80", (), "not allowed for an executor that registers from 10.1.0.7"),
        ("127.0.0.1:50051", (), "allowed: the address that it registers from"),
        ("inside:50052", ("10.1.0.8",), "(--executor-addresses)"),
        ("unknown:50052", (), "the host name cannot be resolved"),
        ("unix:/run/docker.sock:1", (), "cannot be resolved"),
        ("dns://1.2.3.4/10.1.0.7:1", (), "cannot be resolved"),
    ],
)
async def test_executor_is_dialled_nowhere_else(
    address: str, found: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(DomainError) as refused:
        await ExecutorAddresses(AddressRules(), Names(*found)).target(address, PEER)
    assert refused.value.reason == "EXECUTOR_INFO_INVALID"
    assert refused.value.message.startswith(f"address is {address!r}: ")
    assert problem in refused.value.message


async def test_name_is_allowed_for_the_address_it_had() -> None:
    rules = AddressRules.parse("*.executors.local")
    addresses = ExecutorAddresses(rules, Names("10.9.0.1"))
    assert await addresses.target("a.executors.local:1", PEER) == "10.9.0.1:1"
    # It stands for something else now.
    with pytest.raises(DomainError, match=r"allowed: \*.executors.local"):
        await addresses.target("a.executors.local:1", PEER)


async def test_names_are_those_of_the_system() -> None:
    assert {"127.0.0.1", "::1"} & set(await Resolver()("localhost"))
    with pytest.raises(OSError, match="label"):
        await Resolver()("x" * 70 + ".local")


async def test_executor_is_refused_when_its_lookup_is_slow() -> None:
    answered = threading.Event()

    def look_up(host: str) -> list[str]:
        assert answered.wait(PATIENCE_S)
        return ["10.1.0.7"]

    addresses = ExecutorAddresses(AddressRules(), Resolver(look_up, timeout_s=0.01))
    with pytest.raises(DomainError, match="the host name cannot be resolved"):
        await addresses.target("slow:50052", PEER)
    # Whoever needs no name does not wait for that one.
    assert await addresses.target("10.1.0.7:50052", PEER) == "10.1.0.7:50052"
    answered.set()


def test_option_is_refused_by_name() -> None:
    values = options.resolve("scheduler", ["--executor-addresses=10.0.0.1/8"], {})
    with pytest.raises(ValueError, match=r"--executor-addresses: '10.0.0.1/8' is invalid"):
        SchedulerServiceConfig.from_options(values)
    values = options.resolve("scheduler", ["--executor-addresses=10.0.0.0/8,*.local"], {})
    config = SchedulerServiceConfig.from_options(values)
    assert config.executor_addresses == AddressRules.parse("10.0.0.0/8,*.local")
