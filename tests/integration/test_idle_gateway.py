"""What a gateway that only waits does to the scheduler it asks about itself again and again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2

from scheduler_service.audit.audit import CallerRefused
from scheduler_service.callers.caller import Caller, Scope
from splitserve_gateway.config import GatewayConfig
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.listed_audit import ListedAudit
from tests.support.processes.gateway import serving, url_of
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import scheduler_in_process
from tests.support.security.key_ring import KeyRing

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
