"""Quantised checkpoints, compared with `transformers` on the weights that they stand for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from executor_service.checkpoint import ModelConfig, load_model, read_kv_scales
from executor_service.errors import ModelUnreadable, ModelUnsupported
from splitserve_kernels.paged_batch import KVScales
from tests.support.models.quantised_layers import (
    Layer,
    awq_layer,
    compressed_tensors_layer,
    float8_layer,
    fp4_layer,
    gptq_layer,
    int8_layer,
    nf4_layer,
)
from tests.support.models.tiny_models import edit_json, make_tiny_model

GROUP_SIZE = 32
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
GROUPED = {"num_bits": 4, "strategy": "group", "group_size": GROUP_SIZE}


def in_order(weight: Tensor) -> np.ndarray:
    return np.arange(weight.shape[1]) // GROUP_SIZE


def shuffled(weight: Tensor) -> np.ndarray:
    return np.random.default_rng(2).permutation(in_order(weight))


def compressed(weight_format: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    weights = {"type": "int", "symmetric": True, "dynamic": False, **settings}
    return {
        "quant_method": "compressed-tensors",
        "format": weight_format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def compressed_case(
    weight_format: str, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], Callable[[Tensor], Layer]]:
    return compressed(weight_format, settings), lambda weight: compressed_tensors_layer(
        weight, weight_format, settings
    )


def float8_inputs_case() -> tuple[dict[str, Any], Callable[[Tensor], Layer]]:
    settings = {"num_bits": 8, "type": "float", "strategy": "channel"}
    declared, quantise = compressed_case("float-quantized", settings)
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    declared["config_groups"]["group_0"]["input_activations"] = inputs
    return declared, quantise


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE}
CASES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Layer]]] = {
    "w4a16": compressed_case("pack-quantized", GROUPED),
    "w4a16_zero_points": compressed_case("pack-quantized", {**GROUPED, "symmetric": False}),
    "w8a8": compressed_case("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "float8": compressed_case(
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}
    ),
    "float8_inputs": float8_inputs_case(),
    "mxfp4": compressed_case("mxfp4-pack-quantized", {**GROUPED, "type": "float"}),
    "float8_blocks": (FP8, float8_layer),
    "gptq": ({**GPTQ, "desc_act": False}, lambda w: gptq_layer(w, 4, in_order(w))),
    "gptq_act_order": ({**GPTQ, "desc_act": True}, lambda w: gptq_layer(w, 4, shuffled(w))),
    "gptq_8_bits_v2": (
        {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
        lambda w: gptq_layer(w, 8, in_order(w), subtracted=0),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm"},
        lambda w: awq_layer(w, GROUP_SIZE),
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4_layer),
    "fp4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, fp4_layer),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_layer),
}


def write_quantised(
    folder: Path,
    declared: Mapping[str, Any],
    quantise: Callable[[Tensor], Layer],
    architecture: str = "llama",
    **overrides: object,
) -> Any:  # noqa: ANN401
    """Writes a checkpoint whose layers are quantised. `overrides`: of the configuration.

    Returns the model of `transformers` with the weights that it stands for, float32.
    """
    make_tiny_model(architecture, folder, overrides={**SIZES, **overrides})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        if not name.endswith("proj.weight"):
            tensors[name] = parameter.contiguous()
            continue
        parts, expected = quantise(parameter)
        parameter.copy_(expected)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=dict(declared))
    return model.eval()


def float8_tensors(folder: Path, part: str = "") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rounds the matrices of a saved model whose names contain `part` to 8-bit floats.

    Returns all tensors of the checkpoint that stores them, and those that it stands for.
    """
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if part in name and name.endswith("proj.weight"):
            parts, plain[name] = float8_layer(tensor.float())
            stored |= {f"{name.removesuffix('.weight')}.{end}": t for end, t in parts.items()}
        else:
            stored[name] = plain[name] = tensor
    return stored, plain


@torch.inference_mode()
def logits(model: Any) -> Tensor:  # noqa: ANN401
    """Returns logits at near and far positions."""
    model.set_attn_implementation("eager")  # and not ours, which needs pages
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, model.config.vocab_size, (2, 90), generator=generator)
    found: Tensor = model(input_ids=tokens, use_cache=False).logits
    return found


@pytest.mark.parametrize("case", CASES)
def test_model_has_the_logits_of_its_dequantised_weights(tmp_path: Path, case: str) -> None:
    model = write_quantised(tmp_path, *CASES[case])

    loaded = load_model(ModelConfig(str(tmp_path), dtype="float32"))

    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "place"),
    [
        ("w4a16", "compression_config"),
        ("gptq", "quantize_config.json"),
        ("awq", "quant_config.json"),
    ],
)
def test_declaration_may_be_in_older_places(tmp_path: Path, case: str, place: str) -> None:
    declared, quantise = CASES[case]
    model = write_quantised(tmp_path, declared, quantise)
    edit_json(tmp_path / "config.json", quantization_config=None)
    content = {key: value for key, value in declared.items() if key != "quant_method"}
    if place.endswith(".json"):
        (tmp_path / place).write_text(json.dumps(content))
    else:
        edit_json(tmp_path / "config.json", **{place: content})

    loaded = load_model(ModelConfig(str(tmp_path), dtype="float32"))

    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-4, atol=1e-4)


def test_layers_are_read_from_files_of_torch(tmp_path: Path) -> None:
    model = write_quantised(tmp_path, *CASES["gptq"])
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()

    loaded = load_model(ModelConfig(str(tmp_path), dtype="float32"))

    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_of_text", [False, True])
def test_text_part_has_the_weights_of_its_quantised_layers(
    tmp_path: Path, *, is_of_text: bool
) -> None:
    make_tiny_model("llava", tmp_path)
    stored, plain = float8_tensors(tmp_path, "language_model")
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    expected = load_model(ModelConfig(str(tmp_path), dtype="float32"))
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    content = json.loads((tmp_path / "config.json").read_text())
    (content["text_config"] if is_of_text else content)["quantization_config"] = FP8
    (tmp_path / "config.json").write_text(json.dumps(content))

    loaded = load_model(ModelConfig(str(tmp_path), dtype="float32"))

    assert len(stored) == len(plain) + 14
    states = (loaded.model.state_dict(), expected.model.state_dict())
    torch.testing.assert_close(*states, rtol=0.0, atol=0.0)


def test_experts_have_the_logits_of_their_dequantised_weights(tmp_path: Path) -> None:
    make_tiny_model("qwen3_moe", tmp_path)
    stored, plain = float8_tensors(tmp_path)
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    edit_json(tmp_path / "config.json", quantization_config=FP8)

    loaded = load_model(ModelConfig(str(tmp_path), dtype="float32"))

    torch.testing.assert_close(logits(loaded.model), logits(model.eval()), rtol=1e-4, atol=1e-4)


def write_published_experts(folder: Path) -> Any:  # noqa: ANN401
    """Writes gpt-oss as it is published.

    Returns the model of `transformers` with the weights that it stands for, float32.
    """
    make_tiny_model("gpt_oss", folder)
    generator = torch.Generator().manual_seed(5)
    plain = load_file(folder / "model.safetensors")
    stored = dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = stored.pop(name).shape
        shape = (num_experts, num_outputs, num_inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return model.eval()


def test_published_experts_have_the_logits_of_their_dequantised_weights(tmp_path: Path) -> None:
    model = write_published_experts(tmp_path)

    loaded = load_model(ModelConfig(str(tmp_path), dtype="float32"))

    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-4, atol=1e-4)


def test_checkpoint_is_refused_when_a_layer_lacks_its_scales(tmp_path: Path) -> None:
    def without_scales(weight: Tensor) -> Layer:
        parts, expected = float8_layer(weight)
        return {"weight": parts["weight"]}, expected

    write_quantised(tmp_path, FP8, without_scales)

    with pytest.raises(ModelUnreadable, match=r"the weights lack model\.layers\.0\..*weight_scale"):
        load_model(ModelConfig(str(tmp_path), dtype="float32"))


@pytest.mark.parametrize("case", ["gptq", "float8_blocks"])
def test_log_says_how_much_was_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    caplog.set_level(logging.INFO)
    write_quantised(tmp_path, *CASES[case])

    loaded = load_model(ModelConfig(str(tmp_path), dtype="bfloat16"))

    assert loaded.quantization == CASES[case][0]["quant_method"]
    # Two layers of seven matrices.
    assert f"weights_dequantised format={loaded.quantization} num_tensors=14 dtype=bfloat16" in (
        caplog.text
    )


def test_quantised_float16_weights_are_computed_in_bfloat16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_quantised(tmp_path, *CASES["gptq"])
    edit_json(tmp_path / "config.json", dtype="float16")

    loaded = load_model(ModelConfig(str(tmp_path)))

    assert loaded.dtype == torch.bfloat16
    assert "float16_computed_in_bfloat16 format=gptq" in caplog.text


KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}


def test_scales_of_keys_and_values_are_read_beside_quantised_weights(tmp_path: Path) -> None:
    declared, quantise = CASES["w4a16"]
    model = write_quantised(tmp_path, {**declared, "kv_cache_scheme": KV_SCHEME}, quantise)
    weights = tmp_path / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor([number])
        for layer in range(model.config.num_hidden_layers)
        for name, number in (("k_scale", 0.5), ("v_scale", 0.25))
    }
    save_file(load_file(weights) | scales, weights, {"format": "pt"})

    loaded = load_model(ModelConfig(str(tmp_path), dtype="float32"))

    found = read_kv_scales([weights], loaded.model, loaded.attention_modules)
    assert found == (KVScales(0.5, 0.25),) * model.config.num_hidden_layers
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-4, atol=1e-4)


def test_checkpoint_is_refused_when_its_keys_and_values_have_another_scheme(
    tmp_path: Path,
) -> None:
    declared, quantise = CASES["w4a16"]
    scheme = {**KV_SCHEME, "strategy": "channel"}
    write_quantised(tmp_path, {**declared, "kv_cache_scheme": scheme}, quantise)

    with pytest.raises(
        ModelUnsupported, match=r'kv_cache_scheme\.strategy is "channel", not served; supported: '
    ):
        load_model(ModelConfig(str(tmp_path)))
