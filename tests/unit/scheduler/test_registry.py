"""Registrations of one machine leave places for others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest

from scheduler_service.driver import Driver
from scheduler_service.service.registry import (
    MAX_PENDING_OF_A_HOST,
    ExecutorAddresses,
    RegistryServicer,
)
from splitserve.scheduler.v1 import registry_pb2
from splitserve_rpc.addresses import AddressRules
from splitserve_rpc.domain_error import DomainError
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


async def test_registration_is_refused_when_its_host_has_as_many_pending_as_it_may() -> None:
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
