"""Spans of a process and their export. The only module that uses OpenTelemetry's SDK.

A slow or absent collector only costs traces and a log line. Only imported by processes that write
traces.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from splitserve_tracing.trace_config import Sampling, TraceConfig, TraceContext

# Minimum time between log lines about a collector that accepts nothing.
_LINES_EVERY_S = 60.0

_log = logging.getLogger(__name__)


class LossReportingExporter(SpanExporter):
    """Passes spans on, and periodically logs how many were lost. Used by one thread."""

    def __init__(self, exporter: SpanExporter, url: str, clock: Callable[[], float]) -> None:
        self._exporter = exporter
        self._url = url
        self._clock = clock
        self._num_lost = 0
        self._logged_s: float | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._logged_s is not None:
                _log.info("traces_exported_again url=%s num_lost=%d", self._url, self._num_lost)
            self._num_lost, self._logged_s = 0, None
            return result
        self._num_lost += len(spans)
        now_s = self._clock()
        if self._logged_s is None or now_s - self._logged_s >= _LINES_EVERY_S:
            self._logged_s = now_s
            _log.warning("traces_not_exported url=%s num_lost=%d", self._url, self._num_lost)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


Attributes = Mapping[str, str | int | float | bool]

# Maximum number of spans that wait for the collector. Beyond it, the oldest are dropped.
MAX_QUEUED_SPANS = 4096
_BATCH_SPANS = 512
_EXPORT_EVERY_MS = 1000
_EXPORT_TIMEOUT_S = 5.0
_LIMITS = SpanLimits(
    max_span_attributes=64,
    max_events=128,
    max_event_attributes=16,
    max_links=8,
    max_span_attribute_length=256,
)
# Logger of the SDK, which repeats its errors for each batch; `LossReportingExporter` logs each
# once.
_SILENT = "opentelemetry"
_CLOSE_S = 2.0


class Tracing:
    """Begins spans of sampled requests, and sends the spans to a collector."""

    def __init__(
        self,
        config: TraceConfig,
        service: str,
        exporter: SpanExporter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`service`: name of the process in traces.

        `exporter`: None for an exporter to `config.url`.
        """
        logging.getLogger(_SILENT).setLevel(logging.CRITICAL)
        self._sampling = Sampling(config.sampling_ratio, config.most_asked_per_s, clock)
        exporter = exporter or OTLPSpanExporter(config.url, timeout=_EXPORT_TIMEOUT_S)
        self._provider = TracerProvider(
            ALWAYS_ON,  # sampling is decided before a span begins
            Resource.create(
                {
                    "service.name": service,
                    "service.version": metadata.version("splitserve"),
                    "service.instance.id": secrets.token_hex(8),
                    "host.name": socket.gethostname(),
                }
            ),
            shutdown_on_exit=False,
            span_limits=_LIMITS,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                LossReportingExporter(exporter, config.url, clock),
                max_queue_size=MAX_QUEUED_SPANS,
                schedule_delay_millis=_EXPORT_EVERY_MS,
                max_export_batch_size=_BATCH_SPANS,
            )
        )
        self._tracer = self._provider.get_tracer("splitserve")
        self._headers = TraceContextTextMapPropagator()

    def begin(
        self,
        received: TraceContext,
        name: str,
        attributes: Attributes,
        start_ns: int,
        *,
        is_decided: bool = False,
    ) -> tuple[Span | None, TraceContext]:
        """Begins the first span of a request in this process.

        `received`: context that came with the request. `start_ns`: nanoseconds since 1970.
        `is_decided`: as of `Sampling.takes`. Returns the span, None if the request is not sampled,
        and the context to pass on to the next process. The context must be passed on in any case: a
        process without one decides anew, and a trace could contain only its last part.
        """
        context = Context()
        if received.traceparent:
            context = self._headers.extract(
                {"traceparent": received.traceparent, "tracestate": received.tracestate}, context
            )
        caller = trace.get_current_span(context).get_span_context()
        is_asked_for = caller.trace_flags.sampled if caller.is_valid else None
        if not self._sampling.takes(is_asked_for, is_decided=is_decided):
            return None, self._unsampled(caller)
        span = self._tracer.start_span(
            name, context, SpanKind.SERVER, attributes, start_time=start_ns
        )
        return span, self.context_of(span)

    def child(
        self,
        parent: Span,
        name: str,
        attributes: Attributes,
        start_ns: int,
        *,
        is_call: bool = False,
    ) -> Span:
        """Begins a span within `parent`. `is_call`: another process does the work.

        `start_ns`: nanoseconds since 1970.
        """
        return self._tracer.start_span(
            name,
            trace.set_span_in_context(parent, Context()),
            SpanKind.CLIENT if is_call else SpanKind.INTERNAL,
            attributes,
            start_time=start_ns,
        )

    def context_of(self, span: Span) -> TraceContext:
        """Returns the context to pass on to a process that works for `span`."""
        headers: dict[str, str] = {}
        self._headers.inject(headers, trace.set_span_in_context(span, Context()))
        return TraceContext(headers["traceparent"], headers.get("tracestate", ""))

    @staticmethod
    def fail(span: Span, why: str) -> None:
        """Marks `span` as failed. `why`: reason."""
        span.set_status(StatusCode.ERROR, why)

    def close(self) -> None:
        """Sends the queued spans, for two seconds at most. Blocks."""
        # The SDK's own shutdown waits as long as the collector takes.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_CLOSE_S)

    @staticmethod
    def _unsampled(caller: trace.SpanContext) -> TraceContext:
        trace_id = caller.trace_id if caller.is_valid else secrets.randbits(127) + 1
        span_id = caller.span_id if caller.is_valid else secrets.randbits(63) + 1
        return TraceContext(f"00-{trace_id:032x}-{span_id:016x}-00")
