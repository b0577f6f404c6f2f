"""Reads a trace back from Phoenix, of a request that is preempted and loses its executor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest

from splitserve_options import BUNDLED_MODEL
from tests.support.observability.phoenix import (
    RESOURCE_ATTRIBUTES,
    StoredSpan,
    needs_phoenix,
    phoenix,
)
from tests.support.processes.addresses import reserve_address
from tests.support.processes.gate import GATE, GATED_EXECUTOR, GATED_SCHEDULER, Gate
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.processes import Processes, wait_ready

pytestmark = [
    needs_phoenix,
    pytest.mark.timeout(1800),
    pytest.mark.thorough(
        "a collector of 140 packages takes half a minute to start; tests/chaos/test_gateways.py "
        "reads nearly the same from one that is made of OTLP's protos"
    ),
]

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
# Each of the two fits alone; together they are too many long before the first has ended.
POOL = ("--num-device-blocks", "15")
NUM_WORDS = 90
NUM_FIRST_TOKENS = 40
NUM_TOKENS = 100
# Of the second, long after it was preempted. It is killed while none gets more than these.
NUM_BEFORE_THE_KILL = 50


class GatedProcesses(Processes):
    """Real executors, which go no further than their gate says."""

    executor_module = GATED_EXECUTOR


async def test_trace_is_whole_when_it_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(tmp_path / "gate")
    monkeypatch.setenv(GATE, str(gate.path))
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", RESOURCE_ATTRIBUTES)
    running = GatedProcesses(Path(BUNDLED_MODEL))
    http = reserve_address()
    async with phoenix(tmp_path) as collector:
        try:
            flags = ("--traces-to", collector.url, "--trace-sampling", "0")
            running.start_scheduler("--reconnect-timeout-s", "0.2", *GATED_SCHEDULER, *flags)
            first = running.start_executor(*POOL)
            running.start_gateway("--http", http, *flags)
            async with httpx2.AsyncClient(
                base_url=f"http://{http}", timeout=PATIENCE_S, trust_env=False
            ) as client:
                await wait_ready(client)
                request_id = await preempt_and_kill(client, running, first, gate)
            spans = await collector.spans_when(has_ended)
        finally:
            running.kill_all()

    # Nobody asked for the other request's.
    assert {span.trace_id for span in spans} == {TRACE_ID}
    exchange, submit, generate = chain(spans)
    assert exchange.parent_id == PARENT_ID
    assert exchange.attributes["splitserve.request_id"] == request_id
    assert exchange.attributes["http.response.status_code"] == 200
    assert exchange.event_names == ["first_byte"]
    assert submit.attributes["splitserve.attempt"] == 1
    assert generate.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert generate.attributes["splitserve.num_preemptions"] == 1
    check_life(generate, spans, {first, *running.executors})
    check_times(spans)


async def preempt_and_kill(
    client: httpx2.AsyncClient, running: Processes, executor: str, gate: Gate
) -> str:
    """The second of two requests is preempted, and then loses its `executor`; its id."""
    gate.hold(1)
    preempting = asyncio.create_task(complete(client))
    await running.wait_known(1)
    letting_go = asyncio.create_task(let_go_when_both_are_known(running, gate))
    async with client.stream(
        "POST", "/v1/chat/completions", json=chat("lamb", NUM_TOKENS), headers=HEADERS
    ) as answer:
        assert answer.status_code == 200
        counts = num_tokens_so_far(answer)
        async with asyncio.timeout(PATIENCE_S):
            await letting_go
            await preempting
            while await anext(counts) < NUM_BEFORE_THE_KILL - 10:
                pass
            running.kill_executor(executor)
            running.start_executor(*POOL)
            gate.release()
            assert [count async for count in counts][-1] == NUM_TOKENS
        request_id: str = answer.headers["x-request-id"]
        return request_id


async def let_go_when_both_are_known(running: Processes, gate: Gate) -> None:
    await running.wait_known(2)
    gate.hold(NUM_BEFORE_THE_KILL)


async def complete(client: httpx2.AsyncClient) -> None:
    body = chat("fox", NUM_FIRST_TOKENS) | {"stream": False, "stream_options": None}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


def chat(word: str, num_tokens: int) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": " ".join([word] * NUM_WORDS)}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def num_tokens_so_far(answer: httpx2.Response) -> AsyncIterator[int]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]


def has_ended(spans: Sequence[StoredSpan]) -> bool:
    return {span.name for span in spans} >= {"generate", "POST /v1/chat/completions"}


def chain(spans: Sequence[StoredSpan]) -> tuple[StoredSpan, StoredSpan, StoredSpan]:
    """What the gateway does, what it asks for, and what the scheduler does for that."""
    (exchange,) = (span for span in spans if span.name == "POST /v1/chat/completions")
    (submit,) = (span for span in spans if span.name == "submit")
    (generate,) = (span for span in spans if span.name == "generate")
    assert submit.parent_id == exchange.span_id
    assert generate.parent_id == submit.span_id
    return exchange, submit, generate


def check_life(generate: StoredSpan, spans: Sequence[StoredSpan], executors: set[str]) -> None:
    """The phases of the request one by one, what failed, and steps of both executors."""
    phases = [span for span in spans if span.parent_id == generate.span_id]
    names = ["queue", "prefill", "decode", "preempted", "resume", "decode", "recovery", "decode"]
    assert [phase.name for phase in phases] == names
    errors = [phase.error for phase in phases]
    assert errors == [None] * 5 + ["the executor was lost"] + [None] * 2
    assert generate.error is None
    assert generate.event_names == [
        "assigned",
        "first_token",
        "preempted",
        "executor_lost",
        "assigned",
    ]
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(phases))
    steps = [span for span in spans if span.name == "step"]
    parents = {phase.span_id: phase.name for phase in phases}
    assert {parents[step.parent_id] for step in steps} == {"prefill", "resume", "recovery"}
    assert {step.attributes["splitserve.executor"] for step in steps} == executors
    assert all(step.attributes["splitserve.step.compute_us"] > 0 for step in steps)


def check_times(spans: Sequence[StoredSpan]) -> None:
    """Nothing is outside what it is a part of."""
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.start_ns <= span.end_ns
        assert all(span.start_ns <= time_ns <= span.end_ns for _, time_ns in span.events)
        if (whole := by_id.get(span.parent_id)) is not None:
            assert whole.start_ns <= span.start_ns <= span.end_ns <= whole.end_ns, (span, whole)
