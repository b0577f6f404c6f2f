"""Adapters of models whose layers are joined or split: logits are those of merged weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from executor_service.adapters import read_adapter
from splitserve_adapters import CONFIG_NAME, WEIGHTS_NAME, AdapterInvalid
from tests.support.models.peft_adapters import logits_of
from tests.support.models.tiny_models import load_tiny_model
from tests.unit.executor.adapters.adapted_rows import (
    TOKENS,
    TOLERANCE,
    Served,
    difference,
    plain_model,
)

RANK, ALPHA = 3, 5
# Outputs of the tiny models: queries, keys, values, and the inner width.
Q, KV, INNER = 64, 32, 96
_LAYERS = ("model.layers.0", "model.layers.1")
# By the architecture: modules of the adapter, and the rows of the model's that each changes.
_SPLIT = {
    "self_attn.qkv_proj": (("q_proj", 0, Q), ("k_proj", 0, KV), ("v_proj", 0, KV)),
    "mlp.gate_up_proj": (("gate_proj", 0, INNER), ("up_proj", 0, INNER)),
}
_JOINED = {
    "self_attn.q_proj": (("qkv_proj", 0, Q),),
    "self_attn.v_proj": (("qkv_proj", Q + KV, KV),),
    "mlp.gate_proj": (("gate_up_proj", 0, INNER),),
    "mlp.up_proj": (("gate_up_proj", INNER, INNER),),
}
_Rows = Mapping[str, tuple[tuple[str, int, int], ...]]


def peft_files(matrices: Mapping[str, tuple[Tensor, Tensor]], **fields: object) -> dict[str, bytes]:
    """Returns the files of an adapter with the matrices lora_A and lora_B of each module."""
    tensors = {}
    for name, (down, up) in matrices.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    names = sorted({name.rpartition(".")[2] for name in matrices})
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": names,
        **fields,
    }
    return {CONFIG_NAME: json.dumps(config).encode(), WEIGHTS_NAME: save(tensors)}


@pytest.mark.parametrize(
    ("architecture", "rows"), [("llama", _SPLIT), ("phi3", _JOINED)], ids=["split", "joined"]
)
@pytest.mark.parametrize("alphas", [{}, {"q_proj": 2, "up_proj": 9}], ids=["one", "several"])
def test_logits_equal_those_of_merged_weights(
    tmp_path: Path, architecture: str, rows: _Rows, alphas: dict[str, int]
) -> None:
    loaded = load_tiny_model(architecture, tmp_path / "model")
    model: Any = plain_model(tmp_path / "model")
    generator = torch.Generator().manual_seed(7)
    matrices = {}
    for layer in _LAYERS:
        for module, changed in rows.items():
            inputs = model.get_submodule(f"{layer}.{module.partition('.')[0]}.{changed[0][0]}")
            down = torch.randn(RANK, inputs.in_features, generator=generator) / 8
            up = torch.randn(sum(num for _, _, num in changed), RANK, generator=generator) / 8
            matrices[f"{layer}.{module}"] = down, up
            scale = alphas.get(module.rpartition(".")[2], ALPHA) / RANK
            start = 0
            for name, first, num in changed:
                weight = model.get_submodule(f"{layer}.{module.partition('.')[0]}.{name}").weight
                weight.data[first : first + num] += scale * up[start : start + num] @ down
                start += num

    files = peft_files(matrices, alpha_pattern=alphas)
    adapter = read_adapter("a@1", files, loaded, max_rank=8)
    (logits,) = Served(loaded, {"a@1": adapter}).last_logits([TOKENS], ["a@1"])

    assert difference(logits_of(model, TOKENS)[-2:], logits) < TOLERANCE


def test_adapter_is_refused_when_two_modules_change_the_same_outputs(tmp_path: Path) -> None:
    loaded = load_tiny_model("phi3", tmp_path / "model")
    matrices = {
        f"{_LAYERS[0]}.self_attn.{name}": (torch.ones(RANK, 64), torch.ones(num, RANK))
        for name, num in (("q_proj", Q), ("qkv_proj", Q + 2 * KV))
    }
    with pytest.raises(AdapterInvalid, match="change the same outputs"):
        read_adapter("a@1", peft_files(matrices, layers_to_transform=[0]), loaded, max_rank=8)
