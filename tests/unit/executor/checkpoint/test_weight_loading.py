"""How weights come into memory: shards, ties, mapped files."""

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


def test_load_model_reads_every_weight_when_there_are_shards(llama: Path) -> None:
    expected = load_file(llama / "model.safetensors")
    _shard(llama)
    actual = load_model(ModelConfig(str(llama))).model.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_load_model_names_a_tensor_when_a_shard_lacks_it(llama: Path) -> None:
    _shard(llama)
    weights = load_file(llama / "part-1.safetensors")
    name = sorted(weights)[0]
    del weights[name]
    save_file(weights, llama / "part-1.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnreadable, match=f"lack {name} and 0 more"):
        load_model(ModelConfig(str(llama)))


def test_load_model_holds_one_matrix_when_embeddings_are_tied(tmp_path: Path) -> None:
    sizes = {}
    for tied in (False, True):
        directory = tmp_path / str(tied)
        make_tiny_model("llama", directory, overrides={"tie_word_embeddings": tied})
        loaded = load_model(ModelConfig(str(directory)))
        model: Any = loaded.model
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        sizes[tied] = loaded.weights_bytes
    assert "lm_head.weight" not in load_file(tmp_path / "True" / "model.safetensors")
    assert sizes[False] - sizes[True] == VOCAB_SIZE * 64 * 4


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux only")
def test_load_model_maps_the_file_when_the_dtype_stays(llama: Path) -> None:
    loaded = load_model(ModelConfig(str(llama)))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    weights = str(llama / "model.safetensors")
    ranges = [columns[0].split("-") for columns in maps if columns[-1] == weights]
    for parameter in loaded.model.parameters():
        address = parameter.data_ptr()
        assert any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_load_model_says_what_it_read_when_it_has(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _shard(llama)
    with caplog.at_level("INFO", "executor_service"):
        loaded = load_model(ModelConfig(str(llama)))
    [line] = [text for text in caplog.messages if text.startswith("weights_loaded")]
    size = f"{loaded.weights_bytes / 2**10:.2f} KiB"
    assert line.startswith(f"weights_loaded size='{size}' num_files=3 seconds=")
