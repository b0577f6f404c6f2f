"""Gateway processes that stop, and whose scheduler or collector of traces stops.

Streams that go on at another scheduler are in `test_faults.py`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from splitserve_client import AsyncClient, SamplingParams, Tokenizer
from splitserve_options import BUNDLED_MODEL
from tests.contract.stranger.process import poll
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.processes.addresses import reserve_address
from tests.support.processes.gate import GATE, GATED_EXECUTOR, GATED_SCHEDULER, Gate
from tests.support.processes.gateway import MortalScheduler, mortal_scheduler
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.processes import (
    GatewayProcess,
    LightProcesses,
    Processes,
    gateway_process,
    start_gateway,
)
from tests.support.processes.trace_collector import trace_collector

# Generous for busy machines.
pytestmark = pytest.mark.timeout(1800)

PROMPT = "one two three"
NODE_EXAMPLE = Path(__file__).parents[2] / "clients" / "examples" / "node" / "resume_http.mjs"


def expected_text(served: MortalScheduler, seed: int, max_tokens: int) -> str:
    paths = served.executor.tokenizer_files
    tokenizer = Tokenizer.from_files({name: path.read_bytes() for name, path in paths.items()})
    prompt = tokenizer.encode(PROMPT)
    params = SamplingParams(seed=seed, max_tokens=max_tokens)
    (completion,) = expected_completions(prompt, params, vocab_size=served.executor.vocab_size)
    whole = tokenizer.decode([*prompt, *completion.token_ids])
    return whole[len(tokenizer.decode(prompt)) :]


async def read(gateway: GatewayProcess, **body: object) -> tuple[str, list[dict[str, Any]]]:
    """The text of a streamed completion, and its events."""
    events = [event async for event in gateway.events({"prompt": PROMPT, **body})]
    texts = [choice["text"] for event in events for choice in event.get("choices", ())]
    return "".join(texts), events


@asynccontextmanager
async def in_the_middle(
    served: MortalScheduler, gateway: GatewayProcess
) -> AsyncIterator[asyncio.Task[tuple[str, list[dict[str, Any]]]]]:
    """A stream of 60 tokens whose sixth step is held until the end of the context."""
    await gateway.wait_ready()
    served.watch.hold(after=5)
    reading = asyncio.create_task(read(gateway, seed=1, max_tokens=60))
    await served.watch.wait_held()
    yield reading
    served.watch.release()


# -- a scheduler stops -----------------------------------------------------------------------------


async def test_requests_are_refused_when_the_only_scheduler_drains(tmp_path: Path) -> None:
    async with (
        mortal_scheduler(tmp_path, drain_timeout_s=3600) as served,
        gateway_process(served.address) as gateway,
    ):
        async with in_the_middle(served, gateway) as reading:
            served.scheduler.terminate()
            await gateway.wait_ready(503)
            body = {"prompt": PROMPT, "seed": 1, "max_tokens": 60}
            refused = await gateway.http.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
        assert (await reading)[0] == expected_text(served, 1, 60)
        await served.wait_gone()

        await served.start()
        await gateway.wait_ready()
        text, _ = await read(gateway, seed=1, max_tokens=60)
        assert text == expected_text(served, 1, 60)


async def last_of_response(gateway: GatewayProcess, began: asyncio.Event) -> dict[str, Any]:
    """The last event of a streamed response; `began` is set with its first."""
    last: dict[str, Any] = {}
    body = {"input": "one", "stream": True, "max_output_tokens": 60}
    async with gateway.http.stream("POST", "/v1/responses", json=body) as response:
        async for line in response.aiter_lines():
            began.set()
            if line.startswith("data: "):
                last = json.loads(line.removeprefix("data: "))
    return last


async def test_streams_fail_when_their_scheduler_serves_another_model(tmp_path: Path) -> None:
    async with mortal_scheduler(tmp_path) as served, gateway_process(served.address) as gateway:
        await gateway.wait_ready()
        served.watch.hold()
        reading = asyncio.create_task(read(gateway, seed=1, max_tokens=60))
        began = asyncio.Event()
        responding = asyncio.create_task(last_of_response(gateway, began))
        await served.wait_requests(2)
        await served.watch.wait_held()
        served.watch.hold(after=5)
        await asyncio.wait_for(began.wait(), PATIENCE_S)
        await served.watch.wait_held()
        await served.kill()
        served.watch.release()
        await served.executor.stop()
        served.executor.digest = "beef" * 16
        await served.executor.start()
        await served.start()

        text, events = await reading
        assert expected_text(served, 1, 60).startswith(text)
        assert events[-1]["error"]["code"] == "model_changed"
        last = await responding
        assert last["type"] == "response.failed"
        assert "model" in last["response"]["error"]["message"]
        await gateway.wait_ready()
        text, _ = await read(gateway, seed=2, max_tokens=5)
        assert text == expected_text(served, 2, 5)


# -- the gateway stops -----------------------------------------------------------------------------


@pytest.mark.parametrize("drain_timeout_s", ["0.5", "600"])
async def test_gateway_ends_streams_when_its_drain_is_over(
    tmp_path: Path, drain_timeout_s: str
) -> None:
    async with (
        mortal_scheduler(tmp_path) as served,
        gateway_process(served.address, flags=["--drain-timeout-s", drain_timeout_s]) as gateway,
        in_the_middle(served, gateway) as reading,
    ):
        gateway.process.send_signal(signal.SIGTERM)
        if drain_timeout_s == "600":
            await gateway.wait_ready(503)
            gateway.process.send_signal(signal.SIGTERM)

        text, events = await reading
        assert expected_text(served, 1, 60).startswith(text)
        assert events[-1]["error"]["code"] == "draining"
        assert await gateway.exit_code() == 0


class Reader:
    """Client that reads a stream, and goes on elsewhere from the last event that it has."""

    def __init__(self, **body: object) -> None:
        self.text = ""
        self.last_event_id = ""
        self._body = {"prompt": PROMPT, "stream": True, **body}

    async def read(self, gateway: GatewayProcess) -> None:
        """Reads to the end. Raises HTTPError if the connection breaks."""
        headers = {"last-event-id": self.last_event_id} if self.last_event_id else {}
        streaming = gateway.http.stream("POST", "/v1/completions", json=self._body, headers=headers)
        async with streaming as response:
            assert response.status_code == 200, await response.aread()
            fields: dict[str, str] = {}
            async for line in response.aiter_lines():
                name, _, value = line.partition(": ")
                fields[name] = value
                if not line and "id" in fields:
                    event = json.loads(fields["data"])
                    self.text += "".join(choice["text"] for choice in event["choices"])
                    self.last_event_id = fields["id"]
                    fields = {}

    async def wait_begun(self) -> None:
        """Waits for the first event."""

        async def look() -> tuple[bool, str]:
            return bool(self.last_event_id), self.text

        await poll(look, PATIENCE_S)


@pytest.mark.parametrize("seed", [{"seed": 1}, {}], ids=["seed", "drawn seed"])
async def test_stream_goes_on_at_another_gateway_when_its_own_is_killed(
    tmp_path: Path, seed: dict[str, int]
) -> None:
    async with (
        mortal_scheduler(tmp_path) as served,
        gateway_process(served.address) as first,
        gateway_process(served.address) as second,
    ):
        await first.wait_ready()
        await second.wait_ready()
        client = Reader(max_tokens=60, **seed)
        served.watch.hold(after=5)
        reading = asyncio.create_task(client.read(first))
        await served.watch.wait_held()
        await client.wait_begun()
        first.process.kill()
        with pytest.raises(httpx2.HTTPError):
            await reading
        begun, place = client.text, client.last_event_id
        served.watch.release()

        await client.read(second)

        assert client.text.startswith(begun)
        if seed:
            assert client.text == expected_text(served, 1, 60)
        # The rest of an ended stream can be read again.
        whole, client.text, client.last_event_id = client.text, begun, place
        await client.read(second)
        assert client.text == whole


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_node_example_goes_on_when_a_gateway_is_killed(tmp_path: Path) -> None:
    async with (
        mortal_scheduler(tmp_path) as served,
        gateway_process(served.address) as first,
        gateway_process(served.address) as second,
    ):
        await first.wait_ready()
        await second.wait_ready()
        served.watch.hold(after=5)
        gateways = ",".join(str(each.http.base_url).rstrip("/") for each in (first, second))
        body = json.dumps({"seed": 1, "max_tokens": 60})
        client = await asyncio.create_subprocess_exec(
            *("node", str(NODE_EXAMPLE), gateways, PROMPT, body),
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdout is not None
        begun = await client.stdout.read(1)
        await served.watch.wait_held()
        first.process.kill()
        served.watch.release()
        rest, _ = await asyncio.wait_for(client.communicate(), PATIENCE_S)

        assert client.returncode == 0
        assert (begun + rest).decode() == expected_text(served, 1, 60)


async def test_gateway_finishes_open_streams_when_its_parent_is_gone(tmp_path: Path) -> None:
    flags = ["--exit-on-stdin-eof", "--drain-timeout-s", "3600"]
    async with (
        mortal_scheduler(tmp_path) as served,
        gateway_process(served.address, flags=flags) as gateway,
    ):
        async with in_the_middle(served, gateway) as reading:
            assert gateway.process.stdin is not None
            gateway.process.stdin.close()
            gateway.process.stdin = None
            await gateway.wait_ready(503)
        assert (await reading)[0] == expected_text(served, 1, 60)
        assert await gateway.exit_code() == 0


async def test_gateway_exits_by_name_when_its_port_is_in_use() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process = start_gateway(["127.0.0.1:1"], f"127.0.0.1:{port}")
    _, error = await asyncio.to_thread(process.communicate)
    server.close()

    line = f"splitserve gateway: cannot listen on 127.0.0.1:{port}: the port is in use\n"
    assert (process.returncode, (error or b"").decode()) == (1, line)


# -- traces ----------------------------------------------------------------------------------------


async def test_gateway_serves_and_stops_when_its_collector_is_gone(tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:1"
    flags = ["--traces-to", nobody, "--trace-sampling", "1"]
    async with (
        mortal_scheduler(tmp_path, traces_to=nobody, trace_sampling=1) as served,
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


async def test_scheduler_logs_when_traces_are_refused_and_accepted_again(tmp_path: Path) -> None:
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

    # The exporter's own line for each batch.
    assert "Failed to export" not in running.log_text()


TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
NUM_TOKENS = 40


class GatedProcesses(Processes):
    """Executors with the bundled model that stop where the gate says."""

    executor_module = GATED_EXECUTOR


async def test_trace_spans_two_executors_when_the_first_is_killed(
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
                await GatewayProcess(running.gateway, client).wait_ready()
                gate.hold(10)
                request_id = await stream_and_kill(client, running, first, gate)
                # Without a trace context, and not sampled.
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
    (recovery,) = collector.named("recovery")
    assert exchange.parent_id == PARENT_ID
    assert parents[submit.parent_id] is exchange
    assert parents[generate.parent_id] is submit
    assert parents[recovery.parent_id] is generate
    assert {exchange.service, submit.service} == {"splitserve-gateway"}
    assert generate.service == "splitserve-scheduler"
    assert exchange.attributes["splitserve.request_id"] == request_id
    assert exchange.attributes["http.response.status_code"] == 200
    assert exchange.event_names == ["first_byte"]
    assert {span.trace_state for span in (exchange, submit, generate)} == {"vendor=1"}
    assert generate.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert generate.event_names.count("executor_lost") == 1
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
    """Kills `executor` in the middle of a stream, which ends at another; returns the request id."""
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
