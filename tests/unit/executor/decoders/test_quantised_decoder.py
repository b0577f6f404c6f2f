"""Models with quantised weights, computed with their codes by native kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_service.backends import AUTO, TORCH, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import build_native_model, pack_linears
from executor_service.model import (
    LoadedModel,
    QuantizedLinear,
    dequantize_layers,
    probe_attention,
    quantized_linears,
)
from splitserve_kernels.cpu import NativeLibrary
from tests.kernels.cpu.tiny_decoders import Served, random_tokens, serve
from tests.support.models.tiny_models import make_tiny_model

# As gentle as real weights.
GENTLE: Mapping[str, Any] = {"initializer_range": 0.02}
LENGTH = 24
# Of logits whose activations are rounded to 8 bits.
ROUNDING = 0.05


def _directory(
    path: Path,
    architecture: str = "llama",
    dtype: torch.dtype = torch.bfloat16,
    **overrides: Any,  # noqa: ANN401
) -> Path:
    return make_tiny_model(
        architecture, path, seed=1, overrides={**GENTLE, **overrides}, dtype=dtype
    )


def _int4(directory: Path) -> LoadedModel:
    return load_model(ModelConfig(str(directory), rounding="int4"))


@torch.inference_mode()
def _logits(loaded: LoadedModel) -> Tensor:
    return probe_attention(loaded.model, torch.tensor([random_tokens(LENGTH, seed=3)]))[0][0]


def _native_logits(loaded: LoadedModel, library: NativeLibrary, *, is_exact: bool) -> Tensor:
    native = build_native_model(loaded, library, is_exact=is_exact)
    return serve(native, loaded, [Served(random_tokens(LENGTH, seed=3), [LENGTH])], 16)[0]


def _error(actual: Tensor, expected: Tensor) -> float:
    expected = expected[:, : actual.shape[1]]
    return float((actual - expected).norm() / (expected - expected.mean()).norm())


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_native_decoder_equals_transformers_when_weights_are_codes_in_float32(
    tmp_path: Path, native_library: NativeLibrary, architecture: str
) -> None:
    loaded = _int4(_directory(tmp_path, architecture, torch.float32))
    dequantize_layers(loaded.model)
    expected = _logits(loaded)
    quantised = _int4(tmp_path)

    assert _error(_native_logits(quantised, native_library, is_exact=False), expected) < 1e-4


def test_native_decoder_rounds_activations_when_weights_are_codes_in_bfloat16(
    tmp_path: Path, native_library: NativeLibrary
) -> None:
    directory = _directory(tmp_path)
    exact = _native_logits(_int4(directory), native_library, is_exact=True)
    rounded = _native_logits(_int4(directory), native_library, is_exact=False)

    assert 1e-3 < _error(rounded, exact) < ROUNDING


def test_native_decoder_is_smaller_when_weights_are_codes(
    tmp_path: Path, native_library: NativeLibrary
) -> None:
    sizes: Mapping[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 128}
    directory = _directory(tmp_path, **sizes)
    plain = build_native_model(load_model(ModelConfig(str(directory))), native_library)
    quantised = build_native_model(_int4(directory), native_library)

    assert quantised.num_bytes < 0.36 * plain.num_bytes


def test_native_decoder_logs_layers_whose_codes_kernels_do_not_take(
    tmp_path: Path, native_library: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = _int4(_directory(tmp_path, intermediate_size=100))
    assert not isinstance(
        loaded.model.get_submodule("model.layers.0.mlp.down_proj"), QuantizedLinear
    )
    gate = loaded.model.get_submodule("model.layers.0.mlp.gate_proj")
    assert isinstance(gate, QuantizedLinear)
    plain = gate.dense(torch.bfloat16, torch.device("cpu"))
    loaded.model.set_submodule("model.layers.0.mlp.gate_proj", plain)

    with caplog.at_level(logging.WARNING):
        build_native_model(loaded, native_library)

    assert "only some of the layers multiplied together are quantised" in caplog.text
    assert "num_layers=1" in caplog.text


def test_pack_linears_multiplies_with_codes(tmp_path: Path, native_library: NativeLibrary) -> None:
    loaded = _int4(_directory(tmp_path, "gemma2"))
    expected = _logits(loaded)

    packed = pack_linears(loaded, native_library)

    assert not quantized_linears(packed.model)
    assert _error(_logits(packed), expected) < ROUNDING


def test_choose_compute_gives_plain_weights_when_torch_computes(tmp_path: Path) -> None:
    directory = _directory(tmp_path)

    compute = choose_compute(lambda: _int4(directory), TORCH, None)

    assert not quantized_linears(compute.loaded.model)


def test_choose_compute_serves_codes_when_it_is_deterministic(tmp_path: Path) -> None:
    directory = _directory(tmp_path)

    compute = choose_compute(lambda: _int4(directory), AUTO, None, is_deterministic=True)

    assert compute.is_batch_invariant
    assert compute.description.startswith("native decoder")
