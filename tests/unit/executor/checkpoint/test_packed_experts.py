"""Quantised experts that stay packed, beside `transformers` on the weights they stand for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_service.backends import AUTO, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.errors import TrialFailed
from executor_service.model import LoadedModel, quantized_layers
from executor_service.trials import try_experts
from tests.support.models.gguf_writer import write_gguf
from tests.support.models.tiny_models import edit_json, make_tiny_model
from tests.unit.executor.checkpoint.test_quantised_checkpoints import (
    CASES,
    logits,
    write_published_experts,
)
from tests.unit.executor.quantization.test_gguf_model import EXPERTS, OSS

# Files of GGUF: architecture of transformers and of llama.cpp, metadata, type.
FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3_moe": ("qwen3moe", EXPERTS, "Q4_0"),
    "mixtral": ("llama", {**EXPERTS, "rope.freq_base": 1e6}, "Q4_1"),
    "gpt_oss": ("gpt-oss", OSS, "MXFP4"),
}


def _plain(folder: Path) -> Any:  # noqa: ANN401
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _rounded(weight: Tensor, type_name: str) -> Tensor:
    kind = GGMLQuantizationType[type_name]
    held = quants.dequantize(quants.quantize(weight.contiguous().numpy(), kind), kind)
    return torch.from_numpy(held)


def _gguf(
    folder: Path, architecture: str, overrides: Mapping[str, Any] | None = None
) -> tuple[Path, Any]:
    """Writes a file; returns its path and the model of the weights that it holds."""
    own, settings, type_name = FILES[architecture]
    options = {"hidden_size": 64, **(overrides or {})}
    if architecture == "qwen3_moe":
        options["norm_topk_prob"] = True
    make_tiny_model(architecture, folder / "plain", overrides=options)
    model = _plain(folder / "plain")
    path = folder / "model.gguf"
    metadata = {f"{own}.{key}": value for key, value in settings.items()}
    write_gguf(path, model, own, metadata, type_name=type_name)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or "bias" in name:
                continue
            is_turned = architecture == "gpt_oss" and parameter.ndim == 3
            weight = parameter.transpose(1, 2) if is_turned else parameter
            if weight.shape[-1] % 32 == 0:
                rounded = _rounded(weight, type_name)
                parameter.copy_(rounded.transpose(1, 2) if is_turned else rounded)
    return path, model


def _separate_layers(folder: Path, case: str) -> tuple[Path, Any]:
    """Writes a checkpoint with a quantised layer for each matrix of an expert."""
    declared, quantise = CASES[case]
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64}
    make_tiny_model("qwen3_moe", folder, overrides=sizes)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight"):
            parts, plain[name] = quantise(tensor)
            plain[name] = plain[name].contiguous()
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
        else:
            stored[name] = plain[name] = tensor
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    model = _plain(folder)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=declared)
    return folder, model


WRITERS: dict[str, Callable[[Path], tuple[Path, Any]]] = {
    **{f"gguf_{name}": partial(_gguf, architecture=name) for name in FILES},
    **{
        f"qwen3_moe_{case}": partial(_separate_layers, case=case)
        for case in ("awq", "gptq_act_order", "float8_blocks", "w4a16")
    },
    "published_gpt_oss": lambda folder: (folder, write_published_experts(folder)),
}


def _load(path: Path, dtype: str = "float32", *, keeps_packed: bool = True) -> LoadedModel:
    return load_model(ModelConfig(str(path), dtype=dtype, keeps_packed=keeps_packed))


def _weights_bytes(model: torch.nn.Module) -> int:
    return sum(each.untyped_storage().nbytes() for each in model.parameters())


@pytest.mark.parametrize("name", WRITERS)
def test_packed_experts_have_the_logits_of_their_dequantised_weights(
    tmp_path: Path, name: str
) -> None:
    path, model = WRITERS[name](tmp_path)

    compute = choose_compute(lambda: _load(path), AUTO, None)

    assert compute.description.startswith("native attention and matrices")
    assert not quantized_layers(compute.loaded.model)
    torch.testing.assert_close(logits(compute.loaded.model), logits(model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", WRITERS)
def test_model_with_packed_experts_has_no_plain_matrices(tmp_path: Path, name: str) -> None:
    path, _ = WRITERS[name](tmp_path)

    packed = _load(path).model
    plain = _load(path, keeps_packed=False).model

    assert not [name for name, each in packed.named_parameters() if each.ndim == 3]
    num_quantised = sum(
        each.stored.shape[0] * each.stored.shape[1] for each in quantized_layers(packed)
    )
    assert _weights_bytes(packed) <= _weights_bytes(plain) - 4 * num_quantised


def test_experts_in_bfloat16_have_typical_logits(tmp_path: Path) -> None:
    path, model = _gguf(tmp_path, "qwen3_moe")

    compute = choose_compute(lambda: _load(path, "bfloat16"), AUTO, None)

    expected, actual = logits(model), logits(compute.loaded.model).float()
    errors = (actual - expected).norm(dim=-1) / (expected - expected.mean()).norm(dim=-1)
    assert float(errors.median()) <= 0.1


def test_experts_are_packed_when_there_are_as_many_as_layers(tmp_path: Path) -> None:
    path, model = _gguf(tmp_path, "qwen3_moe", {"num_hidden_layers": 4})

    loaded = _load(path)

    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-4, atol=1e-4)


def test_experts_are_dequantised_with_a_warning_when_their_trial_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = _gguf(tmp_path, "qwen3_moe")

    def fail(_like: object) -> None:
        raise TrialFailed("outputs differ")

    monkeypatch.setattr("executor_service.checkpoint.quantised_experts.try_experts", fail)
    with caplog.at_level(logging.WARNING):
        loaded = _load(path)

    assert (
        "quantised_layers_dequantised model=Qwen3MoeForCausalLM first=model.layers.0.mlp"
        in caplog.text
    )
    assert "outputs differ" in caplog.text
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-4, atol=1e-4)


def test_trial_refuses_experts_that_compute_something_else(tmp_path: Path) -> None:
    make_tiny_model("qwen3_moe", tmp_path)
    experts: Any = _plain(tmp_path).model.layers[0].mlp.experts
    forward = type(experts).forward

    class Scaled(type(experts)):  # type: ignore[misc]
        def forward(self, *arguments: Tensor) -> Tensor:
            output: Tensor = forward(self, *arguments)
            return 2 * output

    experts.__class__ = Scaled

    with pytest.raises(TrialFailed, match="outputs of Scaled differ"):
        try_experts(experts)
