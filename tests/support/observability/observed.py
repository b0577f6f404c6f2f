"""Real processes whose metrics are read: a scheduler, light executors, a gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from splitserve_client import AsyncClient, SamplingParams, SplitserveError
from tests.support.metrics import Shown
from tests.support.models import tiny_tokenizers
from tests.support.processes.addresses import reserve_address
from tests.support.processes.gate import GATE, GATED_SCHEDULER, Gate
from tests.support.processes.light_executor import TOKENIZER
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.processes import LightProcesses, wait_ready

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


async def shown_at(address: str) -> Shown:
    """What a process shows there."""
    async with httpx2.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http:
        return Shown((await http.get(f"http://{address}/metrics")).text)


@dataclass(slots=True)
class Observed:
    """What runs. `metrics`: where each process shows its own, by job. `executors`: options."""

    processes: LightProcesses
    client: AsyncClient
    http: httpx2.AsyncClient
    gate: Gate
    metrics: dict[str, list[str]] = field(default_factory=dict)
    executors: dict[str, Sequence[str]] = field(default_factory=dict)

    def start_executor(self, *options: str) -> None:
        """Another one."""
        options = (self.new_metrics("executor"), *options)
        self.executors[self.processes.start_executor(*options)] = options

    def start_missing(self) -> None:
        """Starts executors that have ended, at their addresses."""
        for address, process in list(self.processes.executors.items()):
            if process.poll() is not None:
                self.processes.kill_executor(address)
                self.processes.start_executor(*self.executors[address], address=address)

    def new_metrics(self, job: str) -> str:
        """The option with another address for metrics."""
        address = reserve_address()
        self.metrics.setdefault(f"splitserve-{job}", []).append(address)
        return f"--metrics-listen={address}"

    async def read(self, job: str) -> Shown:
        """What the first process of `job` shows."""
        return await shown_at(self.metrics[f"splitserve-{job}"][0])

    async def complete(self, *prompts: list[int], params: SamplingParams = PARAMS) -> list[str]:
        """All at once, over gRPC; the reasons of those that failed."""

        async def ask(prompt: list[int]) -> str:
            try:
                await self.client.complete(prompt, params)
            except SplitserveError as error:
                return error.reason
            return ""

        return [reason for reason in await asyncio.gather(*map(ask, prompts)) if reason]

    async def ask_gateway(self) -> int:
        """The status of a short completion."""
        body = {"prompt": [1, 2, 3], "max_tokens": 4}
        return (await self.http.post("/v1/completions", json=body)).status_code

    async def wait_ready(self, status: int = 200) -> None:
        """Until the gateway's `/health/ready` says so."""
        await wait_ready(self.http, status)


@asynccontextmanager
async def observed(
    folder: Path,
    *,
    num_executors: int = 2,
    scheduler: Sequence[str] = (),
    executor: Sequence[str] = (),
    gateway: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> AsyncIterator[Observed]:
    """All of it, ready. `scheduler` and so on: further options; `environment`: of executors."""
    processes = LightProcesses(folder / "log")
    gate = Gate(folder / "gate")
    http_address = reserve_address()
    (folder / "tokenizer.json").write_text(tiny_tokenizers.byte_level().to_str())
    told = {GATE: str(gate.path), TOKENIZER: str(folder), **(environment or {})}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        async with (
            AsyncClient(processes.address, PATIENT) as client,
            httpx2.AsyncClient(
                base_url=f"http://{http_address}", timeout=PATIENCE_S, trust_env=False
            ) as http,
        ):
            running = Observed(processes, client, http, gate)
            processes.start_scheduler(
                *GATED_SCHEDULER, running.new_metrics("scheduler"), *scheduler
            )
            for _ in range(num_executors):
                running.start_executor(*executor)
            processes.start_gateway(
                "--http", http_address, running.new_metrics("gateway"), *gateway
            )
            await processes.run_executors(num_executors)
            await running.wait_ready()
            yield running
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        processes.kill_all()
