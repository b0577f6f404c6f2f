"""Roundings of plain weights at load, compared with casts and sums of torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import build_native_model
from executor_service.errors import ModelUnsupported
from executor_service.model import quantized_linears
from executor_service.quantization import ROUNDINGS, round_to_float8
from splitserve_kernels.cpu import NativeLibrary
from tests.kernels.cpu.tiny_decoders import Served, random_tokens, serve
from tests.support.models.tiny_models import make_tiny_model
from tests.unit.executor.checkpoint.test_quantised_checkpoints import CASES, write_quantised

# More than are rounded at once, and outputs of very different sizes.
WEIGHT = torch.randn(1100, 1024, generator=torch.Generator().manual_seed(0))
WEIGHT *= torch.logspace(-4, 2, len(WEIGHT))[:, None]
# Of the codes, whose largest has 1.75 * 2**8, with three bits of mantissa.
LARGEST, SMALLEST_STEP = 448, 2**-9
TOKENS = random_tokens(300, seed=3)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}


def as_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weights [N, K] of torch's 8-bit floats, and scales [N, 1]."""
    scales = weight.abs().amax(1, keepdim=True) / LARGEST
    return (weight / scales).to(torch.float8_e4m3fn), scales


def as_8_bits(weight: Tensor) -> Tensor:
    """Returns weights [N, K] rounded to integers times float16 scales of 32 inputs."""
    groups = weight.reshape(len(weight), -1, 32)
    scales = (groups.abs().amax(2, keepdim=True) / 127).half().float()
    return ((groups / scales).nan_to_num(0).round() * scales).flatten(1)


def test_round_to_float8_gives_the_codes_of_a_cast_by_torch() -> None:
    packed = round_to_float8(WEIGHT, torch.bfloat16)

    codes, scales = as_float8(WEIGHT)
    assert torch.equal(packed.codes(slice(None)), codes.view(torch.uint8))
    assert torch.equal(packed.scales.numbers, scales)
    assert packed.group_size == WEIGHT.shape[1]
    assert torch.equal(packed.dequantized(torch.float32), codes.float() * scales)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounded_weights_stay_on_their_device(name: str) -> None:
    rounding = ROUNDINGS[name]
    for round_to in (rounding.head, rounding.others):
        round_to(torch.empty(64, 64, device="meta"), torch.float32)  # raises otherwise


def test_round_to_float8_changes_weights_by_at_most_half_a_step() -> None:
    errors = (round_to_float8(WEIGHT, torch.float32).dequantized() - WEIGHT).abs()

    steps = torch.maximum(WEIGHT.abs() / 8, SMALLEST_STEP * as_float8(WEIGHT)[1])
    assert bool((errors <= 1.0001 * steps / 2).all())


def test_round_to_float8_keeps_outputs_of_zeros() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, -0.5], [1e-44, 0.0]]).repeat(1, 16)

    rounded = round_to_float8(weight, torch.float32).dequantized()

    assert torch.equal(rounded, torch.where(weight.abs() > 1e-30, weight, 0.0))


@torch.inference_mode()
@pytest.mark.parametrize("is_tied", [False, True])
def test_model_rounded_to_float8_has_the_logits_of_transformers(
    tmp_path: Path, native_library: NativeLibrary, *, is_tied: bool
) -> None:
    make_tiny_model("llama", tmp_path, overrides={**SIZES, "tie_word_embeddings": is_tied})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    head = torch.nn.Parameter(as_8_bits(model.lm_head.weight))
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            codes, scales = as_float8(parameter)
            parameter.copy_(codes.float() * scales)
    model.lm_head.weight = head
    expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0]

    loaded = load_model(ModelConfig(str(tmp_path), dtype="float32", rounding="fp8"))
    native = build_native_model(loaded, native_library)
    (logits,) = serve(native, loaded, [Served(TOKENS, [200, 100])], 16)

    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_load_model_names_layers_whose_inputs_kernels_do_not_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_model("llama", tmp_path, overrides={"intermediate_size": 100})

    loaded = load_model(ModelConfig(str(tmp_path), rounding="fp8"))

    assert len(quantized_linears(loaded.model)) == 2 * 6 + 1
    (message,) = (each.message for each in caplog.records if each.levelno == logging.WARNING)
    assert message == (
        "layers_not_rounded first=model.layers.0.mlp.down_proj num_layers=2"
        " reason='inputs are no multiple of 32'"
    )


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_load_model_refuses_a_rounding_of_quantised_weights(tmp_path: Path, rounding: str) -> None:
    write_quantised(tmp_path, *CASES["gptq"])

    with pytest.raises(ModelUnsupported, match=f"{rounding}: .* is quantised already; allowed: "):
        load_model(ModelConfig(str(tmp_path), rounding=rounding))


def test_load_model_refuses_a_rounding_that_does_not_exist(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)

    with pytest.raises(ModelUnsupported, match="quantization int2: allowed: int4, fp8"):
        load_model(ModelConfig(str(tmp_path), rounding="int2"))
