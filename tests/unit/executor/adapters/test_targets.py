"""Layers that an adapter may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from executor_service.adapters import short_name
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.model import Target
from tests.support.models.gguf_writer import write_gguf
from tests.support.models.tiny_models import load_tiny_model, make_tiny_model
from tests.unit.executor.adapters.adapted_rows import plain_model


def test_targets_are_the_linear_layers_and_the_embedding(tmp_path: Path) -> None:
    targets = load_tiny_model("qwen2", tmp_path / "model").adapter_targets
    assert len(targets) == 2 * 7 + 2
    assert targets["model.embed_tokens"] == Target("model.embed_tokens", 160, 64, is_embedding=True)
    assert targets["lm_head"] == Target("lm_head", 64, 160, is_head=True)
    name = "model.layers.1.self_attn.k_proj"
    assert targets[name] == Target(name, 64, 32, has_bias=True)


def test_targets_of_a_mixture_are_its_experts_and_routers(tmp_path: Path) -> None:
    targets = load_tiny_model("qwen3_moe", tmp_path / "model").adapter_targets
    assert "model.layers.0.self_attn.q_proj" in targets
    experts = "model.layers.0.mlp.experts"
    for target in (
        Target(f"{experts}.gate_up_proj", 64, 64, num_experts=4),
        Target(f"{experts}.down_proj", 32, 64, num_experts=4),
        Target("model.layers.0.mlp.gate", 64, 4, is_router=True),
    ):
        assert targets[target.name] == target
    assert targets[f"{experts}.down_proj"].module == experts


def test_targets_lack_experts_that_compute_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Qwen3MoeExperts.forward

    def doubled(experts: Any, *arguments: Tensor) -> Tensor:  # noqa: ANN401
        result: Tensor = 2 * plain(experts, *arguments)
        return result

    monkeypatch.setattr(Qwen3MoeExperts, "forward", doubled)
    targets = load_tiny_model("qwen3_moe", tmp_path / "model").adapter_targets
    assert "model.layers.0.mlp.gate" in targets
    assert not [name for name in targets if "experts" in name]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("model.layers.0.mlp.up_proj", "layers.0.mlp.up_proj"),
        ("model.language_model.layers.0.mlp.up_proj", "layers.0.mlp.up_proj"),
        ("language_model.model.layers.0.mlp.up_proj", "layers.0.mlp.up_proj"),
        ("transformer.h.0.attn.c_attn", "h.0.attn.c_attn"),
        ("model.layers.0.block_sparse_moe.gate", "layers.0.mlp.gate"),
        ("lm_head", "lm_head"),
    ],
)
def test_short_name_leaves_out_the_model_around(name: str, short: str) -> None:
    assert short_name(name) == short


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_base_tensors_are_those_of_the_model(tmp_path: Path, architecture: str) -> None:
    loaded = load_tiny_model(architecture, tmp_path / "model", dtype="bfloat16")
    model = plain_model(tmp_path / "model")
    for name, tensor in model.state_dict().items():
        expected = tensor.to(torch.bfloat16)
        is_transposed = architecture == "gpt2" and ".c_" in name and name.endswith("weight")
        actual = loaded.base_tensor(name)
        assert actual is not None
        assert torch.equal(actual, expected.T if is_transposed else expected), name
    assert loaded.base_tensor("model.other") is None


def test_base_tensors_are_in_the_order_of_transformers_when_the_file_is_gguf(
    tmp_path: Path,
) -> None:
    make_tiny_model("llama", tmp_path / "model", overrides={"tie_word_embeddings": True})
    model = plain_model(tmp_path / "model")
    write_gguf(tmp_path / "model.gguf", model, "llama", {})
    loaded = load_model(ModelConfig(str(tmp_path / "model.gguf"), dtype="float32"))
    for name, tensor in model.state_dict().items():
        actual = loaded.base_tensor(name)
        assert actual is not None
        assert torch.equal(actual, tensor), name
