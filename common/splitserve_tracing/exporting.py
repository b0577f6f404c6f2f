"""Exporter of spans to a collector. A slow or absent collector only costs traces and a log line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

# Minimum time between log lines about a collector that accepts nothing.
_LINES_EVERY_S = 60.0

_log = logging.getLogger(__name__)


class ToldExporter(SpanExporter):
    """Passes spans on, and periodically logs how many were lost. Used by one thread."""

    def __init__(self, exporter: SpanExporter, url: str, clock: Callable[[], float]) -> None:
        self._exporter = exporter
        self._url = url
        self._clock = clock
        self._num_lost = 0
        self._said_s: float | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._said_s is not None:
                _log.info("traces_exported_again url=%s num_lost=%d", self._url, self._num_lost)
            self._num_lost, self._said_s = 0, None
            return result
        self._num_lost += len(spans)
        now_s = self._clock()
        if self._said_s is None or now_s - self._said_s >= _LINES_EVERY_S:
            self._said_s = now_s
            _log.warning("traces_not_exported url=%s num_lost=%d", self._url, self._num_lost)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
