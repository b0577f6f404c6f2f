"""A trial run that fails is told by what failed, not by the shapes of tensors alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.errors import ModelUnsupported
from executor_service.trials import model_trial
from tests.support.models.tiny_models import make_tiny_model


def test_a_configuration_is_named_when_the_models_own_code_fails_with_it(tmp_path: Path) -> None:
    # Rotary embeddings of 64 numbers, for heads of 16.
    make_tiny_model("codegen", tmp_path)

    with pytest.raises(ModelUnsupported, match="CodeGenForCausalLM") as refusal:
        load_model(ModelConfig(str(tmp_path)))

    assert "its own code in transformers cannot run with this config.json" in str(refusal.value)


def test_paged_attention_is_named_when_a_model_fails_with_that_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:  # noqa: ANN401
        raise RuntimeError("sizes do not match")

    make_tiny_model("llama", tmp_path)
    monkeypatch.setattr(model_trial, "probe_attention", fail)

    with pytest.raises(ModelUnsupported) as refusal:
        load_model(ModelConfig(str(tmp_path)))

    assert "with paged attention alone (sizes do not match)" in str(refusal.value)
