from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.decoders.llama_parts import take_layers
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
