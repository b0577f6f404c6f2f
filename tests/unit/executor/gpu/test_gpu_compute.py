"""What runs a model where Triton is: chosen as on a GPU, with kernels interpreted on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_service.backends import Compute, compute_on_gpu
from executor_service.backends import choose as gpu
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.device import Uploads, copy_in_torch
from executor_service.model import (
    LoadedModel,
    dequantize_layers,
    quantized_linear,
    quantized_linears,
    rounded_to_float8,
    torch_model,
    weights_bytes,
)
from executor_service.quantization import ROUNDINGS
from executor_service.sampling import SamplingRows, adjust_in_torch, draw_unseen_in_torch
from tests.support.models.model_pair import served_logits
from tests.support.models.tiny_models import make_tiny_model
from tests.unit.executor.checkpoint.test_quantised_checkpoints import CASES, SIZES, write_quantised

pytest.importorskip("triton", reason="triton is not installed")

from executor_service.backends import gpu_draw
from executor_service.decoders import GpuQuantizedLinear, gpu_decoder
from splitserve_kernels.gpu import kv_write

BLOCK_SIZE = 8
TOLERANCE = 1e-3
# Interpreted, each layer and each key/value head takes its time.
SMALL: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
PROMPT = [(11 * i + 5) % 90 for i in range(21)]


class Loads:
    """Loads a random model, and counts how often."""

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        architecture: str,
        *,
        task: str = "auto",
        **overrides: object,
    ) -> None:
        make_tiny_model(architecture, directory, seed=2, overrides={**SMALL, **overrides})
        self._config = ModelConfig(str(directory), str(device), max_model_len=64, task=task)
        self.count = 0

    def __call__(self) -> LoadedModel:
        self.count += 1
        return load_model(self._config)


@pytest.fixture
def _attention_passes_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what the trial does not matter to: interpreted, it takes long."""
    monkeypatch.setattr(gpu, "try_backend", lambda *_, **_options: None)


def _choose(loads: Loads) -> Compute:
    return compute_on_gpu(loads, loads(), "triton", BLOCK_SIZE)


def _logits(compute: Compute) -> Tensor:
    return served_logits(compute.loaded, compute.make_model, PROMPT, BLOCK_SIZE)


def _assert_right(compute: Compute, loads: Loads) -> None:
    loaded = loads()
    expected = _logits(Compute(loaded, torch_model, "torch", BLOCK_SIZE))
    torch.testing.assert_close(_logits(compute), expected, atol=TOLERANCE, rtol=0)


def _errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]


def test_compute_on_gpu_takes_all_kernels_when_all_are_right(
    tmp_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    loads = Loads(tmp_path, device, "llama")
    compute = _choose(loads)
    assert compute.description == "GPU decoder, triton attention"
    assert (compute.draw, compute.copy_blocks) == (gpu_draw.triton_draw, kv_write.copy_blocks)
    assert compute.adjust is gpu_draw.triton_adjust
    assert loads.count == 1
    assert not _errors(caplog)
    _assert_right(compute, loads)
    # Weights as before, and the tables in the place of the frequencies.
    loaded = loads()
    tables = 2 * 64 * loaded.layers[0].key_dim // 2 * 4
    buffers = sum(buffer.nbytes for buffer in loaded.model.buffers())
    assert compute.loaded.weights_bytes == weights_bytes(loaded.model) - buffers + tables


@pytest.mark.usefixtures("_attention_passes_its_trial")
def test_compute_on_gpu_takes_its_decoder_when_the_model_returns_vectors(
    tmp_path: Path, device: torch.device
) -> None:
    loads = Loads(tmp_path, device, "llama", task="embed")
    compute = _choose(loads)
    assert compute.description == "GPU decoder, triton attention"
    assert not compute.is_recordable
    assert _logits(compute).shape == (len(PROMPT), compute.loaded.num_outputs)
    _assert_right(compute, loads)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("_attention_passes_its_trial")
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [("olmo2", {}), ("llama", {"hidden_act": "gelu"}), ("ministral3", {})],
)
def test_compute_on_gpu_keeps_transformers_when_the_model_is_no_llama(
    tmp_path: Path,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    architecture: str,
    overrides: Mapping[str, Any],
) -> None:
    loads = Loads(tmp_path, device, architecture, **overrides)
    compute = _choose(loads)
    assert compute.description == "triton attention"
    assert loads.count == 1
    assert not _errors(caplog)
    _assert_right(compute, loads)


@pytest.mark.usefixtures("_attention_passes_its_trial")
def test_compute_on_gpu_loads_again_when_the_decoder_is_wrong(
    tmp_path: Path,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = gpu_decoder.GpuDecoder.run

    def run_wrongly(self: gpu_decoder.GpuDecoder, ids: Tensor, *rest: Any) -> Tensor:  # noqa: ANN401
        return run(self, ids + 1, *rest)

    monkeypatch.setattr(gpu_decoder.GpuDecoder, "run", run_wrongly)
    loads = Loads(tmp_path, device, "llama")
    compute = _choose(loads)
    assert compute.description == "triton attention"
    assert loads.count == 2
    (error,) = _errors(caplog)
    assert "gpu_decoder_refused model=LlamaForCausalLM reason='relative error" in error
    _assert_right(compute, loads)


@pytest.mark.usefixtures("_attention_passes_its_trial")
def test_compute_on_gpu_falls_back_to_torch_when_kernels_are_wrong(
    tmp_path: Path,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, copy = gpu_draw.triton_draw, kv_write.copy_blocks

    def draw_wrongly(adjusted: Tensor, rows: SamplingRows) -> Tensor:
        return draw(adjusted.flip(1), rows)

    def copy_wrongly(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
        copy(pool, sources.flip(0), destinations)

    def adjust_nothing(logits: Tensor, _rows: SamplingRows, _uploads: Uploads) -> Tensor:
        return logits

    monkeypatch.setattr(gpu_draw, "triton_adjust", adjust_nothing)
    monkeypatch.setattr(gpu_draw, "triton_draw", draw_wrongly)
    monkeypatch.setattr(kv_write, "copy_blocks", copy_wrongly)
    compute = _choose(Loads(tmp_path, device, "olmo2"))
    assert (compute.draw, compute.copy_blocks) == (draw_unseen_in_torch, copy_in_torch)
    assert compute.adjust is adjust_in_torch
    errors = _errors(caplog)
    assert [error.split(" reason")[0] for error in errors] == [
        "kernel_refused kernel=sampling",
        "kernel_refused kernel=block_copy",
        "kernel_refused kernel=adjusting",
    ]


# -- Quantised checkpoints -------------------------------------------------------------------------


class QuantisedLoads:
    """Loads a quantised model whose weights stay in their files until they are packed."""

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        name: str,
        architecture: str,
        dtype: str = "float32",
    ) -> None:
        write_quantised(directory, *CASES[name], architecture, num_hidden_layers=1)
        self._config = ModelConfig(str(directory), str(device), dtype, keeps_packed=True)

    def __call__(self) -> LoadedModel:
        return load_model(self._config)

    def logits(self) -> Tensor:
        """Returns the logits of dequantised weights."""
        loaded = self()
        assert len(quantized_linears(loaded.model)) == 7
        dequantize_layers(loaded.model)
        return _logits(Compute(loaded, torch_model, "torch", BLOCK_SIZE))


@pytest.mark.cases(2)
@pytest.mark.usefixtures("_attention_passes_its_trial")
@pytest.mark.parametrize("name", ["w4a16", "awq", "gptq_act_order", "float8_blocks", "mxfp4"])
def test_compute_on_gpu_multiplies_with_packed_weights_when_they_are_quantised(
    tmp_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    loads = QuantisedLoads(tmp_path, device, name, "llama")
    compute = compute_on_gpu(loads, loads(), "triton", BLOCK_SIZE)
    assert compute.description == "GPU decoder, triton attention"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    torch.testing.assert_close(_logits(compute), loads.logits(), atol=TOLERANCE, rtol=0)
    dense = loads()
    dequantize_layers(dense.model)
    assert compute.loaded.weights_bytes < weights_bytes(dense.model)


@pytest.mark.usefixtures("_attention_passes_its_trial")
@pytest.mark.parametrize("is_right", [True, False], ids=["right", "wrong"])
def test_compute_on_gpu_packs_the_layers_of_transformers_when_the_model_is_no_llama(
    tmp_path: Path,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_right: bool,
) -> None:
    if not is_right:
        forward = GpuQuantizedLinear.forward
        monkeypatch.setattr(GpuQuantizedLinear, "forward", lambda *rest: 1.1 * forward(*rest))
    loads = QuantisedLoads(tmp_path, device, "w4a16", "olmo2")
    compute = compute_on_gpu(loads, loads(), "triton", BLOCK_SIZE)
    assert compute.description == "triton attention"
    packed = [m for m in compute.loaded.model.modules() if isinstance(m, GpuQuantizedLinear)]
    assert len(packed) == (7 if is_right else 0)
    assert ("packed_matrices_refused model=Olmo2ForCausalLM" in caplog.text) == (not is_right)
    torch.testing.assert_close(_logits(compute), loads.logits(), atol=TOLERANCE, rtol=0)


@pytest.mark.usefixtures("_attention_passes_its_trial")
def test_compute_on_gpu_dequantises_with_a_warning_when_a_kernel_is_wrong(
    tmp_path: Path,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from splitserve_kernels.gpu.quantized import linear

    right = linear.quantized_linear
    monkeypatch.setattr(linear, "quantized_linear", lambda *rest: 1.1 * right(*rest))
    loads = QuantisedLoads(tmp_path, device, "w4a16", "llama")
    compute = compute_on_gpu(loads, loads(), "triton", BLOCK_SIZE)
    assert compute.description == "GPU decoder, triton attention"
    assert "packed_layers_refused device=" in caplog.text
    assert "products of packed weights are off by" in caplog.text
    torch.testing.assert_close(_logits(compute), loads.logits(), atol=TOLERANCE, rtol=0)


@pytest.mark.usefixtures("_attention_passes_its_trial")
def test_compute_on_gpu_multiplies_8_bit_floats_when_the_checkpoint_has_such_inputs(
    tmp_path: Path,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The noise that is allowed is that of a GPU, also where its kernels are interpreted.
    monkeypatch.setattr(quantized_linear, "_rounded", lambda rows, _: rounded_to_float8(rows))
    loads = QuantisedLoads(tmp_path, device, "float8_inputs", "llama", "bfloat16")
    compute = compute_on_gpu(loads, loads(), "triton", BLOCK_SIZE)
    assert compute.description == "GPU decoder, triton attention"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    exact, rounded = loads.logits(), _logits(compute)
    error = float((rounded - exact).norm() / exact.norm())
    assert 0.005 < error < 0.1


@pytest.mark.cases(1)
@pytest.mark.usefixtures("_attention_passes_its_trial")
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_compute_on_gpu_multiplies_with_weights_that_were_rounded_at_load(
    tmp_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture, rounding: str
) -> None:
    make_tiny_model("llama", tmp_path, overrides={**SIZES, "num_hidden_layers": 1})
    config = ModelConfig(str(tmp_path), str(device), "float32", rounding=rounding)
    compute = compute_on_gpu(lambda: load_model(config), load_model(config), "triton", BLOCK_SIZE)
    assert compute.description == "GPU decoder, triton attention"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    loaded = load_model(config)
    assert len(quantized_linears(loaded.model)) == 8
    dequantize_layers(loaded.model)
    expected = _logits(Compute(loaded, torch_model, "torch", BLOCK_SIZE))
    torch.testing.assert_close(_logits(compute), expected, atol=TOLERANCE, rtol=0)
