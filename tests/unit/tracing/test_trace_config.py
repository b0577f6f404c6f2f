"""What `--traces-to` takes."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from splitserve_rpc.security import SecurityUnusable
from splitserve_tracing.trace_config import TraceConfig


def made(url: str | None, *, insecure: bool = False) -> TraceConfig | None:
    return TraceConfig.from_options(
        {
            "traces_to": url,
            "trace_sampling": 0.5,
            "traces_asked_per_s": 3.0,
            "insecure": insecure,
        }
    )


def test_nobody_gets_traces_when_nothing_is_said() -> None:
    assert made(None) is None


@pytest.mark.parametrize("url", ["http://localhost:4317", "http://[::1]:1", "https://a.b:4317"])
def test_collector_is_what_was_said(url: str) -> None:
    assert made(url) == TraceConfig(url, 0.5, 3.0)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:4317",
        "http://localhost",
        "ftp://localhost:1",
        "http://user:password@localhost:1",
        "http://localhost:1/v1/traces",
        "http://localhost:1?a=b",
    ],
)
def test_url_is_refused_when_it_is_none_of_a_collector(url: str) -> None:
    with pytest.raises(SecurityUnusable, match=r"--traces-to: .* is not allowed; it takes http"):
        made(url)


def test_plain_text_stays_on_this_machine_unless_told_otherwise() -> None:
    with pytest.raises(SecurityUnusable, match="--insecure sends them even so"):
        made("http://collector:4317")

    assert made("http://collector:4317", insecure=True) is not None


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleSpec | None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(SecurityUnusable, match=r"pip install 'splitserve\[otel\]'"):
        made("http://localhost:4317")
