"""One trace from the gateway to the steps of real executors, one of which is killed meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from splitserve_options.option import BUNDLED_MODEL
from tests.support.processes import gated_executor
from tests.support.processes.addresses import reserve_address
from tests.support.processes.gate import GATE, GATED_SCHEDULER, Gate
from tests.support.processes.gateway_process import GatewayProcess
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.processes import Processes
from tests.support.processes.trace_collector import trace_collector

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
NUM_TOKENS = 40


class GatedProcesses(Processes):
    """Real executors, which go no further than their gate says."""

    executor_module = gated_executor.MODULE


async def test_trace_goes_from_the_gateway_to_steps_of_two_executors_when_the_first_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(tmp_path / "gate")
    monkeypatch.setenv(GATE, str(gate.path))
    running = GatedProcesses(Path(BUNDLED_MODEL))
    http = reserve_address()
    async with trace_collector() as collector:
        try:
            flags = ("--traces-to", collector.url, "--trace-sampling", "0")
            running.start_scheduler("--reconnect-timeout-s", "0.2", *GATED_SCHEDULER, *flags)
            await running.run_executors(1)
            (first,) = running.executors
            running.start_gateway("--http", http, *flags)
            assert running.gateway is not None
            async with httpx2.AsyncClient(
                base_url=f"http://{http}", timeout=PATIENCE_S, trust_env=False
            ) as client:
                gateway = GatewayProcess(running.gateway, client)
                await gateway.wait_ready()
                gate.hold(10)
                request_id = await stream_and_kill(client, running, first, gate)
                # Nobody asked for this one.
                body = {"prompt": "a", "max_tokens": 1}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            await collector.wait_for_names("generate", "POST /v1/completions")
        finally:
            running.kill_all()

    spans = collector.spans
    assert {span.trace_id for span in spans} == {TRACE_ID}
    parents = {span.span_id: span for span in spans}
    (exchange,) = collector.named("POST /v1/completions")
    (submit,) = collector.named("submit")
    (generate,) = collector.named("generate")
    assert exchange.parent_id == PARENT_ID
    assert parents[submit.parent_id] is exchange
    assert parents[generate.parent_id] is submit
    assert {exchange.service, submit.service} == {"splitserve-gateway"}
    assert generate.service == "splitserve-scheduler"
    assert exchange.attributes["splitserve.request_id"] == request_id
    assert exchange.attributes["http.response.status_code"] == 200
    assert exchange.event_names == ["first_byte"]
    assert {span.trace_state for span in (exchange, submit, generate)} == {"vendor=1"}
    assert generate.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert generate.event_names.count("executor_lost") == 1
    (recovery,) = collector.named("recovery")
    assert parents[recovery.parent_id] is generate
    assert recovery.attributes["splitserve.executor"] == first
    steps = collector.named("step")
    executors = {step.attributes["splitserve.executor"] for step in steps}
    assert executors == {first, *running.executors}
    assert all(step.attributes["splitserve.step.compute_us"] > 0 for step in steps)
    assert all(
        parents[step.parent_id].name in ("prefill", "recovery")
        and parents[step.parent_id].start_ns <= step.start_ns <= step.end_ns
        for step in steps
    )


async def stream_and_kill(
    client: httpx2.AsyncClient, running: Processes, executor: str, gate: Gate
) -> str:
    """Kills `executor` in the middle of a stream, which ends at another; the request's id."""
    body = {"prompt": "Once", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body, headers=HEADERS) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        running.kill_executor(executor)
        running.start_executor()
        gate.release()
        async with asyncio.timeout(PATIENCE_S):
            async for _ in lines:
                pass
        request_id: str = answer.headers["x-request-id"]
        return request_id
