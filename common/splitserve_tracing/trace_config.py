"""Settings of traces: collector and sampling, checked before the process starts work."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from splitserve_rpc.addresses import is_address, is_loopback
from splitserve_rpc.security import SecurityUnusable

_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Settings of traces. `url`: of a collector that accepts OTLP over gRPC.

    `sampling_ratio`: share of traced requests whose caller has no wish. `most_asked_per_s`: maximum
    number of traces per second for callers that want one.
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
                f"--traces-to needs {missing[0]}: pip install 'splitserve[otel]'"
            )
        return cls(url, values["trace_sampling"], values["traces_asked_per_s"])


def _check(url: str, *, insecure: bool) -> None:
    """Checks the URL of the collector. Raises SecurityUnusable."""
    parts = urlsplit(url)
    is_url = parts.scheme in ("http", "https") and is_address(parts.netloc)
    if not is_url or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise SecurityUnusable(
            f"--traces-to: {url!r} is not allowed; it takes http://HOST:PORT or https://HOST:PORT"
        )
    if parts.scheme == "http" and not insecure and not is_loopback(parts.netloc):
        raise SecurityUnusable(
            f"--traces-to {url}: is on another machine, and is sent names of requests and tenants "
            "in plain text; https:// encrypts, --insecure sends them even so"
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
