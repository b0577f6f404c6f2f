"""How weights come into memory, and that they belong to their configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.errors import ModelUnreadable
from tests.support.models.tiny_models import VOCAB_SIZE, edit_json, load_tiny_model, make_tiny_model


def _shard(directory: Path) -> None:
    """Cuts the weights into three files with an index."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(files.values()):
        part = {name: weights[name] for name in weights if files[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    index = {"weight_map": files, "metadata": {}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_load_model_reads_every_weight_when_there_are_shards(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load_file(llama / "model.safetensors")
    _shard(llama)
    with caplog.at_level("INFO", "executor_service"):
        loaded = load_model(ModelConfig(str(llama)))
    torch.testing.assert_close(loaded.model.state_dict(), expected, rtol=0, atol=0)
    [line] = [text for text in caplog.messages if text.startswith("weights_loaded")]
    size = f"{loaded.weights_bytes / 2**10:.2f} KiB"
    assert line.startswith(f"weights_loaded size='{size}' num_files=3 seconds=")


def test_load_model_names_a_tensor_when_a_shard_lacks_it(llama: Path) -> None:
    _shard(llama)
    weights = load_file(llama / "part-1.safetensors")
    name = sorted(weights)[0]
    del weights[name]
    save_file(weights, llama / "part-1.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnreadable, match=f"lack {name} and 0 more"):
        load_model(ModelConfig(str(llama)))


def test_load_model_holds_one_matrix_when_embeddings_are_tied(tmp_path: Path) -> None:
    """Whether the head is stored or not."""
    sizes = {}
    for tied in (False, True):
        loaded = load_tiny_model("llama", tmp_path / str(tied), tie_word_embeddings=tied)
        model: Any = loaded.model
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        sizes[tied] = loaded.weights_bytes
    assert sizes[False] - sizes[True] == VOCAB_SIZE * 64 * 4
    path = tmp_path / "True" / "model.safetensors"
    weights = load_file(path)
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path, metadata={"format": "pt"})
    assert load_model(ModelConfig(str(path.parent))).weights_bytes == sizes[True]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux only")
def test_load_model_maps_the_file_when_the_dtype_stays(llama: Path) -> None:
    loaded = load_model(ModelConfig(str(llama)))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    weights = str(llama / "model.safetensors")
    ranges = [columns[0].split("-") for columns in maps if columns[-1] == weights]
    for parameter in loaded.model.parameters():
        address = parameter.data_ptr()
        assert any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def _add(directory: Path, *names: str, dtype: torch.dtype = torch.float32) -> None:
    weights = load_file(directory / "model.safetensors")
    weights |= {name: torch.zeros(4, dtype=dtype) for name in names}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


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
def test_load_model_refuses_tensors_that_the_model_lacks(llama: Path, name: str) -> None:
    _add(llama, name, f"{name}.more")
    with pytest.raises(ModelUnreadable) as caught:
        load_model(ModelConfig(str(llama)))
    assert f"LlamaForCausalLM does not use {name} and 1 more tensors" in str(caught.value)
    assert "not served; supported: weights with the config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_load_model_serves_when_what_is_left_out_changes_no_logit(llama: Path) -> None:
    edit_json(llama / "config.json", num_nextn_predict_layers=1)
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


def test_load_model_says_what_would_be_served_when_weights_are_missing(llama: Path) -> None:
    edit_json(llama / "config.json", num_hidden_layers=3)
    with pytest.raises(ModelUnreadable) as caught:
        load_model(ModelConfig(str(llama)))
    assert (
        "the weights lack model.layers.2.input_layernorm.weight and 8 more tensors of"
        " LlamaForCausalLM: not served; supported:"
    ) in str(caught.value)
