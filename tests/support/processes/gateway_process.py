"""A gateway as a process of its own."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from tests.contract.stranger.process import poll
from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import ForkedProcess, start_process
from tests.support.processes.patience import PATIENCE_S

TIMEOUT_S = PATIENCE_S


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """What runs; `http` speaks to it."""

    process: ForkedProcess
    http: httpx2.AsyncClient

    async def wait_ready(self, status: int = 200) -> None:
        """Waits until `/health/ready` says so."""
        await wait_ready(self.http, status)

    async def wait_models(self, names: set[str]) -> None:
        """Waits until just these are served."""

        async def ask() -> tuple[bool, object]:
            models = (await self.http.get("/v1/models")).json()["data"]
            return {model["id"] for model in models} == names, models

        await self.wait_ready()
        await poll(ask, TIMEOUT_S)

    async def events(self, body: dict[str, object]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed completion."""
        body = {**body, "stream": True}
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    async def exit_code(self) -> int:
        """What it ends with."""
        return await asyncio.to_thread(self.process.wait, TIMEOUT_S)


async def wait_ready(http: httpx2.AsyncClient, status: int = 200) -> None:
    """Waits until `/health/ready` of a gateway says so."""

    async def ask() -> tuple[bool, object]:
        try:
            answer = await http.get("/health/ready")
        except httpx2.HTTPError as error:
            return False, error
        return answer.status_code == status, answer.text

    await poll(ask, TIMEOUT_S)


def start_gateway(schedulers: Sequence[str], http: str, *flags: str) -> ForkedProcess:
    """Starts one at `http`."""
    options = ("--schedulers", ",".join(schedulers), "--http", http, *flags)
    return start_process(
        "splitserve_gateway", options, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )


@asynccontextmanager
async def gateway_process(
    *schedulers: str, flags: Sequence[str] = (), tls: ssl.SSLContext | None = None
) -> AsyncIterator[GatewayProcess]:
    """A gateway before `schedulers`. `tls`: how it is spoken to, None: in plain text."""
    address = reserve_address()
    process = start_gateway(schedulers, address, "--log-level", "error", *flags)
    base_url = f"http://{address}" if tls is None else f"https://{address}"
    try:
        async with httpx2.AsyncClient(
            base_url=base_url, timeout=TIMEOUT_S, trust_env=False, verify=tls or True
        ) as http:
            yield GatewayProcess(process, http)
    finally:
        process.kill()
        process.communicate()
