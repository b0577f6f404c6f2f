"""Weights that are no plain numbers are refused by the name of the method, before they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.executor.checkpoint.refusals import LLAMA, refusal, write_checkpoint

_QUANTIZED = [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq with 4 bits"),
    ({"quantization_config": {"quant_method": "awq", "w_bit": 4}}, "awq with 4 bits"),
    ({"quantization_config": {"quant_method": "fp8"}}, "fp8 (quantization_config)"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes with 4 bits"),
    ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes with 8 bits"),
    ({"quantization_config": {"quant_method": "not-invented-yet"}}, "not-invented-yet"),
    ({"quantization_config": {"group_size": 32}}, "a method that it does not name"),
    ({"quantization_config": {}}, "a method that it does not name"),
    ({"quantization_config": "gptq"}, 'quantization_config "gptq"'),
    ({"quantization": {"group_size": 64, "bits": 4}}, "with 4 bits (quantization)"),
    ({"compression_config": {"format": "pack-quantized"}}, "pack-quantized (compression_config)"),
    ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
]


@pytest.mark.usefixtures("asks_no_transformers")
@pytest.mark.parametrize(("changes", "named"), _QUANTIZED)
def test_load_model_names_the_method_when_the_config_says_quantised(
    tmp_path: Path, changes: Mapping[str, Any], named: str
) -> None:
    write_checkpoint(tmp_path, {**LLAMA, **changes})
    text = refusal(tmp_path)
    assert "quantised" in text
    assert named in text
    assert "not served; an unquantised checkpoint of the model would be" in text
    assert "--quantization int8" in text


@pytest.mark.usefixtures("asks_no_transformers")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
        ("hf_quant_config.json", "modelopt"),
    ],
)
def test_load_model_names_the_method_when_a_file_beside_the_config_says_quantised(
    tmp_path: Path, name: str, method: str
) -> None:
    write_checkpoint(tmp_path, LLAMA)
    (tmp_path / name).write_text("{}")
    assert f"quantised: {method} ({name})" in refusal(tmp_path)


def test_load_model_goes_on_when_the_quantization_is_null(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**LLAMA, "quantization_config": None})
    assert "quantised" not in refusal(tmp_path)


@pytest.mark.usefixtures("asks_no_transformers")
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("layers.0.q_proj.weight", torch.zeros(2, 2, dtype=torch.float8_e4m3fn)),
        ("layers.0.q_proj.weight_scale", torch.zeros(2, dtype=torch.float8_e8m0fnu)),
        ("layers.0.q_proj.weight", torch.zeros(2, 2, dtype=torch.int8)),
        ("layers.0.q_proj.weight", torch.zeros(2, 1, dtype=torch.uint8)),
        ("layers.0.q_proj.qweight", torch.zeros(2, 2, dtype=torch.int32)),
        ("layers.0.q_proj.weight_packed", torch.zeros(2, 2, dtype=torch.int32)),
        ("layers.0.experts.gate_up_proj_blocks", torch.zeros(2, 2, 2, dtype=torch.uint8)),
        ("layers.0.experts.down_proj", torch.zeros(2, 2, 2, dtype=torch.int8)),
    ],
)
def test_load_model_refuses_when_weights_are_quantised_and_the_config_is_silent(
    tmp_path: Path, name: str, tensor: torch.Tensor
) -> None:
    write_checkpoint(tmp_path, LLAMA)
    save_file({name: tensor}, tmp_path / "model.safetensors")
    assert f"quantised, though config.json does not tell how: {name} is " in refusal(tmp_path)
