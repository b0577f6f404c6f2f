from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.decoders.llama_config import take_layers
from tests.support.models.tiny_models import make_tiny_model


def test_take_layers_lets_go_of_each_layer_when_the_next_one_is_asked_for(tmp_path: Path) -> None:
    make_tiny_model("qwen3", tmp_path, overrides={"num_hidden_layers": 3})
    loaded = load_model(ModelConfig(str(tmp_path)))
    model: Any = loaded.model
    queries = [layer.self_attn.q_proj.weight.detach().clone() for layer in model.model.layers]
    for index, weights in enumerate(take_layers(loaded)):
        assert torch.equal(weights.query.weight, queries[index])
        kept = [any(p.numel() for p in layer.parameters()) for layer in model.model.layers]
        assert kept == [layer >= index for layer in range(3)]
    assert model.model.embed_tokens.weight.numel()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="there is no /proc")
def test_take_layers_keeps_no_pages_of_layers_that_were_copied(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    make_tiny_model("llama", tmp_path, overrides={**sizes, "initializer_range": 0.02})
    loaded = load_model(ModelConfig(str(tmp_path)))
    file_kib = (tmp_path / "model.safetensors").stat().st_size // 1024
    resident = []
    for layer in take_layers(loaded):
        layer.down.weight.detach().sum()
        layer.query.weight.detach().sum()
        resident.append(_resident_kib(tmp_path))
    # Each alone: its own pages and some around them.
    assert 0 < max(resident) < file_kib // 3


def _resident_kib(directory: Path) -> int:
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(directory / "model.safetensors")):
            return next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    return 0
