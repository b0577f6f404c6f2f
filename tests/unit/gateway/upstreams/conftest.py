"""Polling intervals of schedulers in tests."""

from __future__ import annotations

import pytest

from splitserve_gateway.upstreams import upstream as upstream_module


@pytest.fixture
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "_POLL_S", 3600.0)


@pytest.fixture
def asked_often(asked_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # After `asked_once`, where a whole module has that.
    monkeypatch.setattr(upstream_module, "_POLL_S", 0.01)
