"""Settings of traces: collector and sampling, checked before the process starts work."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from splitserve_common import is_address, is_loopback
from splitserve_rpc import SecurityUnusable

_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Settings of traces. `url`: of a collector that accepts OTLP over gRPC.

    `sampling_ratio`: share of requests to trace among those whose caller leaves the choice open.
    `most_asked_per_s`: maximum number of traces per second that callers ask for.
    """

    url: str
    sampling_ratio: float = 0.01
    most_asked_per_s: float = 50.0

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> TraceConfig | None:
        """Reads the settings from the options of a process; None without traces.

        Raises SecurityUnusable.
        """
        url = values["traces_to"]
        if url is None:
            return None
        _check(url, insecure=values["insecure"])
        missing = [name for name in _MODULES if not _is_installed(name)]
        if missing:
            raise SecurityUnusable(
                f"--traces-to requires {missing[0]}: pip install 'splitserve[otel]'"
            )
        return cls(url, values["trace_sampling"], values["traces_asked_per_s"])


def _check(url: str, *, insecure: bool) -> None:
    """Checks the URL of the collector. Raises SecurityUnusable."""
    parts = urlsplit(url)
    is_url = parts.scheme in ("http", "https") and is_address(parts.netloc)
    if not is_url or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise SecurityUnusable(
            f"--traces-to: {url!r} is invalid; allowed: http://HOST:PORT or https://HOST:PORT"
        )
    if parts.scheme == "http" and not insecure and not is_loopback(parts.netloc):
        raise SecurityUnusable(
            f"--traces-to {url}: is on another machine and would receive names of requests and "
            "tenants in plain text; use https://, or --insecure to allow it"
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


# -- Trace context of a request, passed between processes (W3C Trace Context) ----------------------

# 55 characters in version 00; later versions may append more.
MAX_TRACEPARENT_CHARS = 128
# Minimum that the specification asks vendors to pass on.
MAX_TRACESTATE_CHARS = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Headers of a trace context, unchanged. Empty: no context."""

    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def received(cls, traceparents: list[str], tracestates: list[str]) -> TraceContext:
        """Returns the context in untrusted headers.

        Ignores headers that are repeated or too long.
        """
        if len(traceparents) != 1 or len(traceparents[0]) > MAX_TRACEPARENT_CHARS:
            return NO_CONTEXT
        tracestate = ",".join(tracestates)
        if len(tracestate) > MAX_TRACESTATE_CHARS:
            tracestate = ""
        return cls(traceparents[0], tracestate)


NO_CONTEXT = TraceContext()


# -- Sampling of requests for traces ---------------------------------------------------------------


class Sampling:
    """Samples requests for tracing, once per request.

    The sampling decision of a caller is followed: "no" always, "yes" up to `most_asked_per_s` for
    all callers together, since traces cost time that other requests must not pay for. All further
    requests are sampled at random with probability `ratio`, independently of the trace id, since a
    caller could choose an id that is always sampled. A decision of another splitserve process,
    which applies the same limit to its callers, is followed and does not count here.
    """

    def __init__(
        self,
        ratio: float,
        most_asked_per_s: float,
        clock: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`clock`: monotonic seconds. `draw`: returns a number from 0 to below 1."""
        self._ratio = ratio
        self._most_asked_per_s = most_asked_per_s
        self._clock = clock
        self._draw = draw
        # Burst: the traces of one second may be asked for at once.
        self._num_left = self._most = max(1.0, most_asked_per_s) if most_asked_per_s else 0.0
        self._looked_s = clock()

    def takes(self, is_asked_for: bool | None, *, is_decided: bool = False) -> bool:
        """Returns whether to trace a request. `is_asked_for`: the caller's decision, None for none.

        `is_decided`: the caller is a splitserve process that samples by the same rules.
        """
        if is_asked_for is False:
            return False
        if is_asked_for and (is_decided or self._take_asked()):
            return True
        return self._draw() < self._ratio

    def _take_asked(self) -> bool:
        now_s = self._clock()
        self._num_left += (now_s - self._looked_s) * self._most_asked_per_s
        self._num_left = min(self._num_left, self._most)
        self._looked_s = now_s
        if self._num_left < 1.0:
            return False
        self._num_left -= 1.0
        return True
