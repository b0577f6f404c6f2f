"""A collector of traces that is gone, or takes nothing, costs a line of the log and no request."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc
import pytest

from splitserve_client import AsyncClient, SamplingParams
from tests.contract.stranger.process import poll
from tests.support.processes.gateway_process import gateway_process
from tests.support.processes.mortal_scheduler import mortal_scheduler
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.processes import LightProcesses
from tests.support.processes.trace_collector import trace_collector

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

NOBODY = "http://127.0.0.1:1"


async def test_gateway_serves_and_stops_when_nobody_takes_its_traces(tmp_path: Path) -> None:
    flags = ["--traces-to", NOBODY, "--trace-sampling", "1"]
    async with (
        mortal_scheduler(tmp_path, traces_to=NOBODY, trace_sampling=1) as served,
        gateway_process(served.address, flags=flags) as gateway,
    ):
        await gateway.wait_ready()
        body = {"prompt": "one", "max_tokens": 3}
        answers = await asyncio.gather(
            *(gateway.http.post("/v1/completions", json=body) for _ in range(20))
        )
        gateway.process.send_signal(signal.SIGTERM)

        assert {answer.status_code for answer in answers} == {200}
        assert await gateway.exit_code() == 0


async def test_scheduler_says_that_traces_are_refused_and_that_they_are_taken_again(
    tmp_path: Path,
) -> None:
    running = LightProcesses(tmp_path / "log")
    async with trace_collector() as collector:
        collector.refusal = grpc.StatusCode.PERMISSION_DENIED
        try:
            flags = ("--traces-to", collector.url, "--trace-sampling", "1")
            running.start_scheduler("--log-level", "info", *flags)
            await running.run_executors(1)
            async with AsyncClient(running.address, PATIENT) as client:

                async def ask_until(event: str, num_times: int) -> None:
                    async def ask() -> tuple[bool, object]:
                        await client.complete([1, 2], SamplingParams(seed=1, max_tokens=2))
                        text = running.log_text()
                        enough = collector.num_calls >= num_times
                        return f" {event} " in text and enough, text

                    await poll(ask, PATIENCE_S)

                await ask_until("traces_not_exported", 3)
                collector.refusal = None
                await ask_until("traces_exported_again", 4)
        finally:
            running.kill_all()

    # The exporter says this for each batch.
    assert "Failed to export" not in running.log_text()
