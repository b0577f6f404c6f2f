"""A checkpoint directory, looked at before `transformers` sees it.

Everything that can be wrong with files is found here, where it can be said in one clear line.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_service.errors import ModelUnreadable

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")

# Files up to this size are hashed whole; of larger ones, evenly spread samples.
_WHOLE_FILE_BYTES = 16 * 2**20
_SAMPLE_BYTES = 64 * 2**10
_NUM_SAMPLES = 64
_MAX_HEADER_BYTES = 100 * 2**20
_MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory that holds a configuration and complete weight files."""

    directory: Path
    weight_files: tuple[Path, ...]

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """The tokenizer's files that exist."""
        paths = (self.directory / name for name in _TOKENIZER_FILES)
        return tuple(path for path in paths if path.is_file())

    def digest(self) -> str:
        """Lower-case hex SHA-256 that tells one checkpoint from another.

        It covers `config.json` in full, and of each weight file its name, its size and its content:
        files up to 16 MiB whole, larger ones as their safetensors header and 64 samples of 64 KiB,
        the last bytes included. So it notices another model, dtype, shape or training run, but not
        single bytes changed between two samples. To read terabytes at each start would cost
        minutes.
        """
        sha256 = hashlib.sha256()
        for path in (self.directory / "config.json", *self.weight_files):
            size = path.stat().st_size
            sha256.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                for start, length in _sampled_ranges(path, size):
                    file.seek(start)
                    sha256.update(file.read(length))
        return sha256.hexdigest()


def resolve_checkpoint(model: str) -> Checkpoint:
    """Finds the checkpoint `model`: a directory, or a model id of the Hugging Face hub.

    Raises ModelUnreadable if it is missing, incomplete or broken.
    """
    directory = Path(model).expanduser()
    if not directory.is_dir():
        if directory.exists() or not _HUB_ID.fullmatch(model):
            raise ModelUnreadable(f"{model}: no such directory")
        directory = _download(model)
    return Checkpoint(directory, _check_files(directory))


def _download(model: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(_HUB_PATTERNS)))
    except Exception as error:
        # Hub, HTTP and file errors share no base class; all mean the same here.
        raise ModelUnreadable(
            f"{model}: no such directory, and not available from the hub ({one_line(error)})"
        ) from error


def _check_files(directory: Path) -> tuple[Path, ...]:
    """The weight files of `directory`, sorted, each complete."""
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise ModelUnreadable(f"{directory}: config.json is missing")
    _read_json(config_path)
    for single, index in (_SAFETENSORS, _PICKLED):
        if (directory / single).is_file():
            files: tuple[Path, ...] = (directory / single,)
        elif (directory / index).is_file():
            files = _shards(directory / index)
        else:
            continue
        for path in files:
            if path.suffix == ".safetensors":
                _check_safetensors(path)
        return files
    raise ModelUnreadable(f"{directory}: no weights (model.safetensors or its index is missing)")


def _shards(index_path: Path) -> tuple[Path, ...]:
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelUnreadable(f"{index_path}: has no weight_map")
    paths = tuple(index_path.parent / name for name in sorted(set(weight_map.values())))
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelUnreadable(
            f"{index_path.parent}: {len(missing)} of {len(paths)} weight files are missing,"
            f" the first is {missing[0]}"
        )
    return paths


def _check_safetensors(path: Path) -> None:
    """Compares the size of the file with what its header promises."""
    size = path.stat().st_size
    header_bytes = _header_bytes(path)
    try:
        with path.open("rb") as file:
            file.seek(8)
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        data_bytes = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ModelUnreadable(f"{path}: the safetensors header is corrupt") from error
    expected = 8 + header_bytes + data_bytes
    if size != expected:
        problem = "truncated" if size < expected else "corrupt"
        raise ModelUnreadable(f"{path}: {problem}, {size} bytes where {expected} are expected")


def _header_bytes(path: Path) -> int:
    """Length of the JSON header of a safetensors file."""
    with path.open("rb") as file:
        prefix = file.read(8)
    if len(prefix) < 8:
        raise ModelUnreadable(f"{path}: truncated, only {len(prefix)} bytes")
    length = int(struct.unpack("<Q", prefix)[0])
    if length > _MAX_HEADER_BYTES:
        raise ModelUnreadable(f"{path}: the safetensors header is corrupt")
    return length


def _sampled_ranges(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the parts of a file that the digest covers."""
    if size <= _WHOLE_FILE_BYTES:
        yield 0, size
        return
    if path.suffix == ".safetensors":
        yield 0, 8 + _header_bytes(path)
    for sample in range(_NUM_SAMPLES):
        yield sample * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1), _SAMPLE_BYTES


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{path}: not readable as JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise ModelUnreadable(f"{path}: not a JSON object")
    return content


def one_line(error: BaseException) -> str:
    """What an error says, on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "..."
