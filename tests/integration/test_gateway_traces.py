"""Spans of the gateway, read back over OTLP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.processes.gateway import MortalScheduler, mortal_scheduler
from tests.support.processes.processes import GatewayProcess, gateway_process
from tests.support.processes.trace_collector import TraceCollector, trace_collector

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
BODY = {"prompt": "one two three", "seed": 1, "max_tokens": 4}
PATH = "POST /v1/completions"


@asynccontextmanager
async def traced(
    *schedulers: MortalScheduler, sampling: str = "0"
) -> AsyncIterator[tuple[GatewayProcess, TraceCollector]]:
    async with trace_collector() as collector:
        flags = ["--traces-to", collector.url, "--trace-sampling", sampling]
        async with gateway_process(*(each.address for each in schedulers), flags=flags) as gateway:
            await gateway.wait_ready()
            yield gateway, collector


async def test_request_that_goes_on_elsewhere_asks_twice_in_one_trace(tmp_path: Path) -> None:
    async with (
        mortal_scheduler(tmp_path) as first,
        mortal_scheduler(tmp_path) as second,
        traced(first, second) as (gateway, collector),
    ):
        for each in (first, second):
            each.watch.hold(after=2)
        body = {**BODY, "max_tokens": 30, "stream": True}
        headers = {"traceparent": SAMPLED}
        request = gateway.http.stream("POST", "/v1/completions", json=body, headers=headers)
        async with request as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            has_it = first if first.watch.steps else second
            await has_it.watch.wait_held()
            await has_it.kill()
            for each in (first, second):
                each.watch.release()
            async for _ in lines:
                pass
        await collector.wait_for_names(PATH)
        spans = collector.spans

    (exchange,) = (span for span in spans if span.name == PATH)
    calls = sorted((s for s in spans if s.name == "submit"), key=lambda span: span.start_ns)
    assert {span.trace_id for span in spans} == {TRACE_ID}
    assert [call.parent_id for call in calls] == [exchange.span_id] * 2
    assert [call.is_error for call in calls] == [True, False]
    addresses = {call.attributes["server.address"] for call in calls}
    assert addresses == {first.address, second.address}


@pytest.mark.parametrize(
    ("body", "status"), [({**BODY, "max_tokens": -1}, 400), ({**BODY, "model": "none"}, 404)]
)
async def test_refused_request_has_a_span_with_its_status(
    tmp_path: Path, body: dict[str, object], status: int
) -> None:
    async with mortal_scheduler(tmp_path) as served, traced(served) as (gateway, collector):
        headers = {"traceparent": SAMPLED}
        answer = await gateway.http.post("/v1/completions", json=body, headers=headers)
        await collector.wait_for_names(PATH)
        (exchange,) = collector.named(PATH)

    assert answer.status_code == status
    assert exchange.attributes["http.response.status_code"] == status
    # Which is the caller's.
    assert not exchange.is_error


async def test_span_has_no_unknown_path_and_health_has_no_span(tmp_path: Path) -> None:
    async with (
        mortal_scheduler(tmp_path) as served,
        traced(served, sampling="1") as (gateway, collector),
    ):
        await gateway.http.get("/health/ready")
        await gateway.http.get("/made/up?secret=1", headers={"traceparent": SAMPLED})
        await collector.wait_for(lambda spans: len(spans) == 1)
        (exchange,) = collector.spans

    assert exchange.name == "GET"
    assert exchange.attributes["http.route"] == "other"
    assert "made" not in repr(exchange)


async def test_prompts_of_one_request_are_asked_for_side_by_side(tmp_path: Path) -> None:
    async with mortal_scheduler(tmp_path) as served, traced(served) as (gateway, collector):
        body = {**BODY, "prompt": ["secretive a", "secretive b", "secretive c"]}
        headers = {"traceparent": SAMPLED, "x-made-up": "secretive"}
        answer = await gateway.http.post("/v1/completions", json=body, headers=headers)
        await collector.wait_for_names(PATH)

    assert answer.status_code == 200
    (exchange,) = collector.named(PATH)
    assert exchange.attributes["splitserve.num_calls"] == 3
    assert [call.parent_id for call in collector.named("submit")] == [exchange.span_id] * 3
    assert "secretive" not in repr(collector.spans)
