"""A checkpoint and its configuration belong together, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.errors import ModelUnreadable
from tests.support.models.tiny_models import VOCAB_SIZE, make_tiny_model


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "tiny-llama")


def _add(directory: Path, *names: str, dtype: torch.dtype = torch.float32) -> None:
    weights = load_file(directory / "model.safetensors")
    weights |= {name: torch.zeros(4, dtype=dtype) for name in names}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _edit_config(directory: Path, **changes: Any) -> None:  # noqa: ANN401
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.gate_proj.weight_scale",
        "model.layers.2.mlp.gate_proj.weight",
        "model.vision_tower.patch_embedding.weight",
        "score.weight",
        "v_head.summary.weight",
        "lm_head.bias",
    ],
)
def test_load_model_refuses_when_the_model_has_no_place_for_a_tensor(
    llama: Path, name: str
) -> None:
    _add(llama, name, f"{name}.more")
    with pytest.raises(ModelUnreadable) as caught:
        load_model(ModelConfig(str(llama)))
    assert f"LlamaForCausalLM has no place for {name} and 1 more tensors" in str(caught.value)
    assert "not served; served would be weights with the config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_load_model_serves_when_what_is_left_out_changes_no_logit(llama: Path) -> None:
    _edit_config(llama, num_nextn_predict_layers=1)
    _add(
        llama,
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.mtp.0.proj.weight",
        "mtp_block.norm.weight",
        "model.layers.2.self_attn.q_proj.weight",
    )
    _add(llama, "model.position_ids", dtype=torch.int64)
    assert load_model(ModelConfig(str(llama))).vocab_size == VOCAB_SIZE


def test_load_model_serves_when_transformers_itself_lists_the_tensor(tmp_path: Path) -> None:
    make_tiny_model("gpt_neox", tmp_path)
    _add(tmp_path, "gpt_neox.layers.0.attention.bias", dtype=torch.bool)
    _add(tmp_path, "gpt_neox.layers.0.attention.masked_bias")
    assert load_model(ModelConfig(str(tmp_path))).vocab_size == VOCAB_SIZE


def test_load_model_serves_when_the_model_makes_the_tensor_by_itself(tmp_path: Path) -> None:
    import transformers

    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 64, "vocab_size": VOCAB_SIZE}
    config = transformers.GPTBigCodeConfig.from_dict(sizes)
    transformers.GPTBigCodeForCausalLM(config).save_pretrained(tmp_path)
    _add(tmp_path, "transformer.bias", dtype=torch.bool)
    _add(tmp_path, "transformer.h.0.attn.masked_bias")
    assert load_model(ModelConfig(str(tmp_path))).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("has_both", [True, False])
def test_load_model_serves_tied_weights_when_the_head_is_stored_or_not(
    tmp_path: Path, has_both: bool
) -> None:
    make_tiny_model("llama", tmp_path, overrides={"tie_word_embeddings": True})
    if has_both:
        weights = load_file(tmp_path / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_model(ModelConfig(str(tmp_path))).vocab_size == VOCAB_SIZE


def test_load_model_says_what_would_be_served_when_weights_are_missing(llama: Path) -> None:
    _edit_config(llama, num_hidden_layers=3)
    with pytest.raises(ModelUnreadable) as caught:
        load_model(ModelConfig(str(llama)))
    assert (
        "the weights lack model.layers.2.input_layernorm.weight and 8 more tensors of"
        " LlamaForCausalLM, which would be random: not served; served would be"
    ) in str(caught.value)
