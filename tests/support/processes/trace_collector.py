"""A collector of traces: a gRPC server of OTLP, which keeps what it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as api
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from tests.support.processes.patience import PATIENCE_S


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span as it came. Ids are hexadecimal; `parent_id` is empty for the first of a trace."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    is_error: bool
    trace_state: str

    @property
    def event_names(self) -> list[str]:
        return [name for name, _ in self.events]


class TraceCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Collector of spans. `spans`: all received. `refusal`: status that it answers instead."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.num_calls = 0
        self.refusal: grpc.StatusCode | None = None
        self.address = ""
        self._changed = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def Export(  # noqa: N802
        self, request: api.ExportTraceServiceRequest, context: grpc.aio.ServicerContext
    ) -> api.ExportTraceServiceResponse:
        self.num_calls += 1
        if self.refusal is not None:
            await context.abort(self.refusal, "no")
        async with self._changed:
            self.spans += spans_of(request)
            self._changed.notify_all()
        return api.ExportTraceServiceResponse()

    async def wait_for(self, holds: Callable[[Sequence[CollectedSpan]], bool]) -> None:
        """Waits until `holds` of all spans."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: holds(self.spans))

    async def wait_for_names(self, *names: str) -> None:
        """Waits until there is a span of each name."""
        await self.wait_for(lambda spans: {span.name for span in spans} >= set(names))

    def named(self, name: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.name == name]


def spans_of(request: api.ExportTraceServiceRequest) -> list[CollectedSpan]:
    return [
        CollectedSpan(
            attributes_of(resource.resource.attributes)["service.name"],
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            attributes_of(span.attributes),
            [(event.name, attributes_of(event.attributes)) for event in span.events],
            span.status.code == span.status.STATUS_CODE_ERROR,
            span.trace_state,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def attributes_of(found: Sequence[KeyValue]) -> dict[str, Any]:
    return {each.key: value_of(each.value) for each in found}


def value_of(value: AnyValue) -> object:
    return getattr(value, value.WhichOneof("value") or "string_value")


@asynccontextmanager
async def trace_collector() -> AsyncIterator[TraceCollector]:
    """Runs a collector on a free port."""
    collector = TraceCollector()
    server = grpc.aio.server()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
