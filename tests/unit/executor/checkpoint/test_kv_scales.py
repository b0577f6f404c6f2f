"""Scales of keys and values are read under all their names, and anything odd is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from executor_service.checkpoint import ModelConfig, is_kv_scale, load_model, read_kv_scales
from executor_service.errors import ModelUnsupported
from splitserve_kernels.paged_batch import KVScales
from tests.support.models.tiny_models import edit_json, load_tiny_model

NAMES = [
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
]


class _Model(nn.Module):
    """Of three layers, of which the second has no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module() for _ in range(3)])
        for layer in (0, 2):
            self.layers[layer].self_attn = nn.Linear(1, 1)

    @property
    def attention_modules(self) -> tuple[nn.Module, ...]:
        return tuple(self.get_submodule(f"layers.{layer}.self_attn") for layer in (0, 2))


def _read(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[KVScales, ...]:
    save_file(dict(tensors), folder / "model.safetensors")
    model = _Model()
    return read_kv_scales([folder / "model.safetensors"], model, model.attention_modules)


@pytest.mark.parametrize("names", NAMES)
def test_read_kv_scales_finds_scales_by_all_names_in_use(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    tensors = {
        f"model.layers.{layer}.{name}": torch.tensor([number], dtype=torch.bfloat16)
        for layer, numbers in ((0, (0.5, 0.25)), (2, (2.0, 4.0)))
        for name, number in zip(names, numbers, strict=True)
    }
    assert _read(tmp_path, tensors) == (KVScales(0.5, 0.25), KVScales(2.0, 4.0))


def test_read_kv_scales_takes_one_for_both_when_there_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tensors = {f"layers.{layer}.self_attn.kv_scale": torch.tensor(0.5) for layer in (0, 2)}
    assert _read(tmp_path, tensors) == (KVScales(0.5, 0.5),) * 2
    assert "kv_scales_read num_layers=2 keys=0.5..0.5 values=0.5..0.5" in caplog.text


def test_read_kv_scales_says_so_when_there_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _read(tmp_path, {"layers.0.self_attn.k_proj.weight_scale": torch.ones(1)}) == ()
    assert "kv_scales_missing" in caplog.text


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        (
            {"2.self_attn.k": torch.ones(2)},
            r"k_scale has shape \[2\]: allowed: one number per layer",
        ),
        ({"2.self_attn.k": torch.tensor(0.0)}, "k_scale is 0.0: allowed: a positive number"),
        ({"2.self_attn.k": torch.tensor(-1.0)}, "k_scale is -1.0"),
        ({"2.self_attn.k": torch.tensor(torch.nan)}, "k_scale is nan"),
        ({"2.self_attn.k": torch.tensor(torch.inf)}, "k_scale is inf"),
        (None, "no k_scale of layer 2: allowed: both"),
    ],
)
def test_read_kv_scales_refuses_missing_and_invalid_scales(
    tmp_path: Path, scales: Mapping[str, Tensor] | None, reason: str
) -> None:
    layers = (0,) if scales is None else (0, 2)
    tensors = {f"layers.{layer}.self_attn.kv_scale": torch.ones(1) for layer in layers}
    tensors |= {f"layers.{name}_scale": scale for name, scale in (scales or {}).items()}
    with pytest.raises(ModelUnsupported, match=reason):
        _read(tmp_path, tensors)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *((f"model.layers.0.{name}", True) for names in NAMES for name in names),
        ("model.layers.0.self_attn.q_scale", True),
        ("model.layers.0.self_attn.attn.prob_scale", True),
        ("model.layers.0.self_attn.k_zero_point", False),
        ("model.layers.0.self_attn.k_proj.weight_scale", False),
        ("model.layers.0.self_attn.k_proj.input_scale", False),
        ("model.layers.0.mlp.output_scale", False),
    ],
)
def test_is_kv_scale_knows_what_no_weight_depends_on(name: str, is_one: bool) -> None:
    assert is_kv_scale(name) == is_one


def test_load_model_computes_the_same_when_keys_and_values_were_calibrated(tmp_path: Path) -> None:
    """Scales matter only to pools of 8 bits."""
    plain = load_tiny_model("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.5)
        for layer in range(len(plain.layers))
        for name in ("k_scale", "v_scale")
    }
    save_file(load_file(weights) | scales, weights, metadata={"format": "pt"})
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    scheme |= {"dynamic": False, "symmetric": True}
    declared = {"quant_method": "compressed-tensors", "config_groups": {}}
    edit_json(tmp_path / "config.json", quantization_config={**declared, "kv_cache_scheme": scheme})
    calibrated = load_model(ModelConfig(str(tmp_path)))
    assert calibrated.kv_scales == ()
    states = (plain.model.state_dict(), calibrated.model.state_dict())
    torch.testing.assert_close(states[0], states[1], atol=0, rtol=0)
    found = read_kv_scales([weights], calibrated.model, calibrated.attention_modules)
    assert found == (KVScales(0.5, 0.5),) * len(plain.layers)
