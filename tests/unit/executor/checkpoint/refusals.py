"""Checkpoints that are refused, and what they are refused with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.errors import ExecutorError

SMALL_SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 16,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL_SIZES}


def refusal(directory: Path) -> str:
    """The one line that `directory` is refused with; it may not hint at what would not help."""
    with pytest.raises(ExecutorError) as caught:
        load_model(ModelConfig(str(directory)))
    text = str(caught.value)
    assert "\n" not in text
    for bad_advice in ("optimum", "trust_remote_code", "pip install", "Traceback"):
        assert bad_advice not in text
    return text


def write_checkpoint(directory: Path, config: Mapping[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.zeros(2, 2)}, directory / "model.safetensors")
