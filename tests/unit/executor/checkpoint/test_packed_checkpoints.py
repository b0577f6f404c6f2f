"""Quantised checkpoints whose weights stay packed, computed by native kernels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, quants
from safetensors.torch import save_file
from torch import Tensor

from executor_service.backends import AUTO, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import NativeModel, PackedEmbeddingModule, build_native_model
from executor_service.model import LoadedModel, quantized_linears
from splitserve_kernels.cpu import NativeLibrary
from tests.kernels.cpu.tiny_decoders import Served, random_tokens, serve
from tests.support.models.gguf_writer import round_matrices, write_gguf
from tests.support.models.quantised_layers import float8_layer
from tests.support.models.tiny_models import edit_json, make_tiny_model
from tests.unit.executor.checkpoint.test_quantised_checkpoints import (
    CASES,
    FP8,
    float8_tensors,
    write_quantised,
)

TOKENS = random_tokens(40, seed=3)
# Largest relative error of logits: that of float32 sums.
TOLERANCE = 5e-4
# In bfloat16, with activations rounded to 8 bits.
ROUNDING = 0.1
# Codes that are no integers, and scales of 24 bits, which only 16-bit layers may round.
NOT_PACKED = ("nf4", "fp4", "w4a16", "w4a16_zero_points")
# Of an architecture: part of the names, the first tensor, and how many there are.
RENAMED = {
    "llava": ("language_model", "language_model.model.layers.0.mlp.down_proj.weight", 14),
}


def _load(path: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelConfig(str(path), dtype=dtype, keeps_packed=True))


@torch.inference_mode()
def _expected(model: Any) -> Tensor:  # noqa: ANN401
    logits: Tensor = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return logits


def _errors(native: NativeModel, loaded: LoadedModel, expected: Tensor) -> Tensor:
    (actual,) = serve(native, loaded, [Served(list(TOKENS), [len(TOKENS)])], 16)
    difference = (actual - expected).norm(dim=-1)
    errors: Tensor = difference / (expected - expected.mean()).norm(dim=-1)
    return errors


@pytest.mark.parametrize("name", CASES)
def test_decoder_computes_codes_of_a_checkpoint_as_transformers_computes_its_weights(
    tmp_path: Path, native_library: NativeLibrary, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    model = write_quantised(tmp_path, *CASES[name])

    loaded = _load(tmp_path)
    num_packed = len(quantized_linears(loaded.model))
    with caplog.at_level(logging.WARNING):
        native = build_native_model(loaded, native_library)

    assert num_packed == 7 * model.config.num_hidden_layers
    assert float(_errors(native, loaded, _expected(model)).max()) <= TOLERANCE
    assert ("quantised_layers_dequantised" in caplog.text) == (name in NOT_PACKED)


@pytest.mark.parametrize("name", ["w4a16", "gptq_act_order", "awq", "float8_blocks"])
def test_decoder_computes_codes_of_a_checkpoint_in_bfloat16(
    tmp_path: Path, native_library: NativeLibrary, name: str
) -> None:
    model = write_quantised(tmp_path, *CASES[name])

    loaded = _load(tmp_path, "bfloat16")

    native = build_native_model(loaded, native_library)
    assert float(_errors(native, loaded, _expected(model)).median()) <= ROUNDING


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_decoder_computes_codes_of_a_gguf_file(
    tmp_path: Path, native_library: NativeLibrary, type_name: str, is_tied: bool
) -> None:
    make_tiny_model("llama", tmp_path / "plain", overrides={"tie_word_embeddings": is_tied})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, attn_implementation="eager"
    )
    write_gguf(tmp_path / "model.gguf", model, "llama", {}, type_name=type_name)
    kind = GGMLQuantizationType[type_name]
    for parameter in model.parameters():
        if parameter.ndim == 2:
            held = quants.dequantize(quants.quantize(parameter.detach().numpy(), kind), kind)
            parameter.data = torch.from_numpy(np.ascontiguousarray(held))
    model.tie_weights()

    loaded = _load(tmp_path / "model.gguf")
    num_packed = len(quantized_linears(loaded.model))
    native = build_native_model(loaded, native_library)

    assert num_packed == 7 * model.config.num_hidden_layers + 1
    assert float(_errors(native, loaded, _expected(model)).max()) <= TOLERANCE


@pytest.mark.parametrize("is_tied", [False, True])
def test_gguf_file_is_packed_without_plain_matrices(
    tmp_path: Path, native_library: NativeLibrary, is_tied: bool
) -> None:
    make_tiny_model("llama", tmp_path / "plain", overrides={"tie_word_embeddings": is_tied})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    write_gguf(tmp_path / "model.gguf", model, "llama", {}, type_name="Q8_0")
    matrices = {id(each): each for each in model.parameters() if each.ndim == 2}.values()

    loaded = _load(tmp_path / "model.gguf")
    plain = [each for each in loaded.model.parameters() if each.ndim > 1]
    native = build_native_model(loaded, native_library)

    assert not plain
    # Codes and scales; outputs are padded to whole panels.
    assert native.num_bytes <= 1.2 * sum(each.numel() for each in matrices) * 34 / 32


@pytest.mark.parametrize("is_tied", [False, True])
def test_transformers_looks_up_codes_of_the_embedding(tmp_path: Path, is_tied: bool) -> None:
    options = {"tie_word_embeddings": is_tied}
    make_tiny_model("phi3", tmp_path / "plain", overrides=options)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, attn_implementation="eager"
    )
    settings = {"phi3.attention.sliding_window": model.config.sliding_window}
    write_gguf(tmp_path / "model.gguf", model, "phi3", settings, type_name="Q8_0")
    round_matrices(model, "Q8_0")

    compute = choose_compute(lambda: _load(tmp_path / "model.gguf"), AUTO, None)

    packed: Any = compute.loaded.model
    packed.set_attn_implementation("eager")
    assert isinstance(packed.get_input_embeddings(), PackedEmbeddingModule)
    torch.testing.assert_close(_expected(packed), _expected(model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ["gemma2", "phi3"])
def test_matrices_of_transformers_are_computed_with_codes(
    tmp_path: Path, architecture: str
) -> None:
    declared, quantise = CASES["gptq"]
    write_quantised(tmp_path, declared, quantise, architecture)
    compute = choose_compute(lambda: _load(tmp_path, "bfloat16"), AUTO, None)

    assert compute.description.startswith("native attention and matrices")
    assert not quantized_linears(compute.loaded.model)


def _write_renamed(folder: Path, architecture: str) -> None:
    """Writes 8-bit floats under names that `transformers` changes, of the parts in `RENAMED`."""
    make_tiny_model(architecture, folder)
    stored, _ = float8_tensors(folder, RENAMED[architecture][0])
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=FP8)


@pytest.mark.parametrize("architecture", RENAMED)
def test_log_warns_once_of_layers_that_cannot_stay_packed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str
) -> None:
    _write_renamed(tmp_path, architecture)
    _, first, num_layers = RENAMED[architecture]

    loaded = _load(tmp_path)

    (message,) = (each.message for each in caplog.records if each.levelno == logging.WARNING)
    assert message.startswith("quantised_layers_dequantised model=")
    assert f" first={first} num_layers={num_layers} reason='transformers renames, " in message
    assert message.endswith(" price='they take the memory and time of float32'")
    assert not quantized_linears(loaded.model)


@pytest.mark.parametrize("architecture", RENAMED)
def test_log_does_not_warn_when_dequantised_layers_are_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str
) -> None:
    caplog.set_level(logging.INFO)
    _write_renamed(tmp_path, architecture)
    num_layers = RENAMED[architecture][2]

    load_model(ModelConfig(str(tmp_path), dtype="float32"))

    assert f"weights_dequantised format=fp8 num_tensors={num_layers} " in caplog.text
    assert all(each.levelno < logging.WARNING for each in caplog.records)


def test_log_does_not_warn_of_layers_that_are_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_tiny_model("llama", tmp_path)
    stored, _ = float8_tensors(tmp_path)
    ahead = {f"mtp.{name}": tensor.clone() for name, tensor in stored.items() if "proj" in name}
    embedding = "model.embed_tokens.weight"
    parts, _ = float8_layer(stored.pop(embedding).float())
    stored |= {embedding.replace("weight", part): tensor for part, tensor in parts.items()}
    save_file(stored | ahead, tmp_path / "model.safetensors", {"format": "pt"})
    edit_json(tmp_path / "config.json", quantization_config=FP8)

    _load(tmp_path)

    assert "weights_dequantised" not in caplog.text
    assert all(each.levelno < logging.WARNING for each in caplog.records)


def test_float16_checkpoint_is_computed_in_bfloat16_when_it_stays_packed(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    write_quantised(tmp_path, *CASES["gptq"])
    config = (tmp_path / "config.json").read_text()
    for name in ("float32", "bfloat16"):
        config = config.replace(f'"dtype": "{name}"', '"dtype": "float16"')
    (tmp_path / "config.json").write_text(config)

    assert _load(tmp_path, "auto").dtype == torch.bfloat16
