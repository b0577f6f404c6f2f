"""Tests why a scheduler or a gateway does not serve, and gateways that only wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2

from scheduler_service.audit import CallerRefused
from scheduler_service.callers import Caller, Scope
from splitserve_client import Readiness
from splitserve_gateway.config import GatewayConfig
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.addresses import reserve_address
from tests.support.processes.fake_service import TIMEOUT_S
from tests.support.processes.gateway import (
    RunningGateway,
    held_gateway,
    serving,
    url_of,
    watched_gateway,
)
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import scheduler_in_process
from tests.support.security.credentials import KeyRing, ListedAudit

PATH = "/v1/completions"
COMPLETION = {"model": "fake", "prompt": "abc", "max_tokens": 60, "ignore_eos": True}
# More than it takes to know what steps take.
NUM_STEPS = 20


async def wait_ready(gateway: RunningGateway, status: int, body: dict[str, object]) -> None:
    """Asks `/health/ready` until it says so."""

    async def ask() -> tuple[bool, object]:
        answer = await gateway.http.get("/health/ready")
        found = (answer.status_code, answer.json())
        return found == (status, body), found

    await poll(ask, TIMEOUT_S)


def not_ready(word: str) -> dict[str, object]:
    return {"status": "no scheduler is ready", "schedulers": [word]}


async def test_scheduler_says_that_nothing_goes_on_while_a_step_hangs(tmp_path: Path) -> None:
    async with held_gateway(
        tmp_path, after=NUM_STEPS, step_patience_s=0.2, step_timeout_s=3600
    ) as (gateway, watch):
        client = gateway.service.client
        assert (await client.get_model()).readiness is Readiness.READY
        completing = asyncio.create_task(gateway.http.post(PATH, json=COMPLETION))
        await watch.wait_held()

        await wait_ready(gateway, 503, not_ready("NO_PROGRESS"))
        assert (await client.get_model()).readiness is Readiness.NO_PROGRESS
        assert not await client.is_serving()

        watch.release()
        assert (await completing).status_code == 200
        await wait_ready(gateway, 200, {"status": "ready"})
        assert (await client.get_model()).readiness is Readiness.READY


async def test_scheduler_says_that_it_has_no_executor_until_one_comes_back(tmp_path: Path) -> None:
    async with watched_gateway(tmp_path) as (gateway, _):
        [executor] = gateway.service.executors
        await executor.kill()
        await wait_ready(gateway, 503, not_ready("NO_EXECUTOR"))
        await executor.start()
        await wait_ready(gateway, 200, {"status": "ready"})
        assert (await gateway.service.client.get_model()).readiness is Readiness.READY


async def test_gateway_says_that_it_reaches_no_scheduler() -> None:
    config = GatewayConfig(schedulers=reserve_address())
    async with (
        serving(config) as server,
        httpx2.AsyncClient(base_url=url_of(server), timeout=PATIENCE_S, trust_env=False) as http,
    ):
        answer = await http.get("/health/ready")
    assert (answer.status_code, answer.json()) == (503, not_ready("UNREACHABLE"))


# Of several looks of the gateway.
NUM_IDENTIFIED = 12


class CountingKeyRing(KeyRing):
    def __init__(self) -> None:
        super().__init__()
        self.num_to_come = 0
        self.is_enough = asyncio.Event()

    def identify(self, credential: str) -> Caller:
        self.num_to_come -= 1
        if self.num_to_come == 0:
            self.is_enough.set()
        return super().identify(credential)


async def test_ready_gateway_leaves_no_refusal_in_the_audit_log(tmp_path: Path) -> None:
    keys, audit, key_file = CountingKeyRing(), ListedAudit(), tmp_path / "key"
    key_file.write_text(keys.add("gateways", Scope.GATEWAY))
    async with scheduler_in_process(FakeExecutor(), callers=keys, audit=audit) as scheduler:
        config = GatewayConfig(schedulers=scheduler.address, gateway_key_file=key_file)
        async with (
            serving(config) as server,
            httpx2.AsyncClient(base_url=url_of(server), trust_env=False) as http,
        ):

            async def is_ready() -> tuple[bool, int]:
                status = (await http.get("/health/ready")).status_code
                return status == 200, status

            await poll(is_ready, PATIENCE_S)
            keys.num_to_come = NUM_IDENTIFIED
            async with asyncio.timeout(PATIENCE_S):
                await keys.is_enough.wait()
    assert [event for event in audit.events if isinstance(event, CallerRefused)] == []
