"""Folders and files that are no checkpoint are refused by what they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.errors import ExecutorError
from tests.unit.executor.checkpoint.refusals import LLAMA, refusal, write_checkpoint


def _touch(*names: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        for name in names:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")

    return write


def _adapter(directory: Path, base: str | None = "some-org/some-model") -> None:
    content = {"peft_type": "LORA", "base_model_name_or_path": base}
    (directory / "adapter_config.json").write_text(json.dumps(content))
    (directory / "adapter_model.safetensors").touch()


def _adapter_and_weights(directory: Path) -> None:
    _adapter(directory)
    write_checkpoint(directory, LLAMA)


def _embeddings(directory: Path) -> None:
    write_checkpoint(directory, LLAMA)
    (directory / "config_sentence_transformers.json").write_text("{}")


@pytest.mark.usefixtures("asks_no_transformers")
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda _: None, "config.json is missing: an empty directory, not served"),
        (_adapter, "LORA adapter of the model some-org/some-model"),
        (lambda directory: _adapter(directory, None), "adapter of the model that it does not name"),
        (_adapter_and_weights, "beside the weights of a model, not served together"),
        (_touch("adapter_config.json"), "PEFT adapter of the model that it does not name"),
        (_touch("model-q4.gguf", "README.md"), "GGUF weights (model-q4.gguf), not served"),
        (_touch("config.json", "model.gguf"), "GGUF weights (model.gguf), not served"),
        (_touch("params.json", "consolidated.00.pth"), "weights in their publisher's format"),
        (_touch("params.json", "consolidated.safetensors"), "weights in their publisher's format"),
        (_touch("model_index.json", "unet/config.json"), "a diffusers pipeline"),
        (_touch("config.json", "model.onnx"), "an ONNX export (model.onnx), not served"),
        (_touch("config.json", "onnx/model.onnx"), "an ONNX export (onnx), not served"),
        (_touch("config.json", "tf_model.h5"), "TensorFlow weights (tf_model.h5), not served"),
        (_touch("config.json", "flax_model.msgpack"), "Flax weights"),
        (_touch("tokenizer.json", "tokenizer_config.json"), "a tokenizer without a model"),
        (_touch("config.json", "tokenizer.json"), "no weights (neither model.safetensors nor"),
        (_touch("README.md"), "config.json is missing; there is README.md, not served"),
        (_touch("snapshots/12/config.json", "snapshots/12/model.safetensors"), "did you mean"),
        (_embeddings, "a sentence-transformers model, which makes embeddings"),
    ],
)
def test_load_model_says_what_a_folder_is_when_it_is_no_checkpoint(
    tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    write(tmp_path)
    text = refusal(tmp_path)
    assert message in text
    assert "served would be" in text or "did you mean" in text


@pytest.mark.parametrize(("name", "kind"), [("m.gguf", "GGUF weights"), ("m.bin", "a file, not")])
def test_load_model_says_what_it_is_when_a_file_is_given(
    tmp_path: Path, name: str, kind: str
) -> None:
    (tmp_path / name).touch()
    assert kind in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", {"base_model_name_or_path": "some-org/some-model"}),
        ("model_index.json", {}),
        ("config.json", {**LLAMA, "quantization_config": {"quant_method": "gptq"}}),
    ],
)
def test_load_model_downloads_no_weights_when_small_files_rule_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: Mapping[str, Any]
) -> None:
    def download(_model: str, *, allow_patterns: list[str]) -> str:
        assert "*.safetensors" not in allow_patterns
        (tmp_path / name).write_text(json.dumps(content))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ExecutorError, match="not served"):
        load_model(ModelConfig("some-org/no-such-model"))


@pytest.mark.parametrize("name", ["../model.safetensors", "", 3, None, ["a"]])
def test_load_model_refuses_when_the_index_names_no_file(tmp_path: Path, name: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lm_head.weight is in " in refusal(tmp_path)
