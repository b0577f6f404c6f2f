from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from executor_service.checkpoint import check_directory, resolve_checkpoint
from executor_service.errors import ModelUnreadable


def _write(directory: Path, name: str = "model.safetensors", size: int = 100) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    save_file({"weight": torch.arange(size, dtype=torch.uint8)}, directory / name)
    return directory / name


def test_resolve_checkpoint_finds_files_when_complete(tmp_path: Path) -> None:
    weights = _write(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("")
    checkpoint = resolve_checkpoint(str(tmp_path))
    assert checkpoint.weight_files == (weights,)
    names = ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/rag.jinja"]
    assert checkpoint.tokenizer_files == {name: tmp_path / name for name in names}


def test_resolve_checkpoint_finds_all_shards_when_there_is_an_index(tmp_path: Path) -> None:
    shards = (_write(tmp_path, "b.safetensors"), _write(tmp_path, "a.safetensors"))
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolve_checkpoint(str(tmp_path)).weight_files == tuple(sorted(shards))


def _writing(name: str, content: bytes | None) -> Callable[[Path], None]:
    """Writes a file, or removes it."""

    def write(directory: Path) -> None:
        if content is None:
            (directory / name).unlink()
        else:
            (directory / name).write_bytes(content)

    return write


def _cutting(size: int) -> Callable[[Path], None]:
    """Cuts the weights to `size` bytes, or cuts so many off."""

    def cut(directory: Path) -> None:
        path = directory / "model.safetensors"
        os.truncate(path, size % path.stat().st_size)

    return cut


def _spoil_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:20] = b"x" * 12
    path.write_bytes(content)


def _miss_shards(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (_writing("config.json", None), "config.json is missing"),
        (_writing("config.json", b'{"model_type": '), "config.json: not readable as JSON"),
        (_writing("config.json", b"[]"), "config.json: not a JSON object"),
        (_writing("model.safetensors", None), "no weights"),
        (_cutting(-10), "model.safetensors: truncated"),
        (_cutting(5), "model.safetensors: truncated"),
        (_spoil_header, "header is corrupt"),
        (_writing("model.safetensors", b"version https://git-lfs" * 8), "header is corrupt"),
        (_miss_shards, "2 of 2 weight files are missing, the first is model-1.safetensors"),
    ],
)
@pytest.mark.parametrize("look", [resolve_checkpoint, check_directory])
def test_both_name_the_problem_when_a_checkpoint_is_broken(
    tmp_path: Path, look: Callable[[str], object], breaks: Callable[[Path], None], message: str
) -> None:
    _write(tmp_path)
    breaks(tmp_path)
    with pytest.raises(ModelUnreadable, match=message) as caught:
        look(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_check_directory_passes_complete_folders_and_hub_names(tmp_path: Path) -> None:
    _write(tmp_path)
    check_directory(str(tmp_path))
    check_directory("someone/some-model")


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "a/b/c"])
def test_resolve_checkpoint_says_so_when_there_is_no_directory(model: str) -> None:
    with pytest.raises(ModelUnreadable, match="no such directory"):
        resolve_checkpoint(model)


@pytest.mark.parametrize("model", ["/nowhere/model.gguf", "model.gguf", "a/model.gguf"])
def test_resolve_checkpoint_says_so_when_there_is_no_gguf_file(model: str) -> None:
    with pytest.raises(ModelUnreadable, match=f"^{model}: no such file$"):
        resolve_checkpoint(model)


def test_resolve_checkpoint_says_so_when_the_hub_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> str:
        raise ConnectionError("offline\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(
        ModelUnreadable, match=r"not available from the hub \(offline second line\)$"
    ):
        resolve_checkpoint("someone/some-model")


def test_resolve_checkpoint_uses_the_snapshot_when_given_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert resolve_checkpoint("someone/some-model").directory == tmp_path


def test_digest_is_equal_when_the_content_is(tmp_path: Path) -> None:
    for name in ("one", "two"):
        _write(tmp_path / name)
    digests = {resolve_checkpoint(str(tmp_path / name)).digest() for name in ("one", "two")}
    assert len(digests) == 1
    assert len(digests.pop()) == 64


@pytest.mark.parametrize("size", [100, 20 * 2**20])
def test_digest_differs_when_the_last_weight_does(tmp_path: Path, size: int) -> None:
    path = _write(tmp_path, size=size)
    before = resolve_checkpoint(str(tmp_path)).digest()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert resolve_checkpoint(str(tmp_path)).digest() != before


def test_digest_differs_when_the_config_does(tmp_path: Path) -> None:
    _write(tmp_path)
    before = resolve_checkpoint(str(tmp_path)).digest()
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert resolve_checkpoint(str(tmp_path)).digest() != before
