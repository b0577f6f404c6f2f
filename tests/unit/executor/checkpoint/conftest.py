"""What a refusal comes before."""

from __future__ import annotations

import pytest


@pytest.fixture
def reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_args: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("executor_service.checkpoint.model_loader.read_model", read)


@pytest.fixture
def asks_no_transformers(monkeypatch: pytest.MonkeyPatch, reads_no_weights: None) -> None:
    def read(*_args: object) -> None:
        raise AssertionError("transformers is asked")

    monkeypatch.setattr("executor_service.checkpoint.model_loader._read_config", read)
