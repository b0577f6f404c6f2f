"""Checks of a checkpoint directory before `transformers` reads it, and its digest.

All problems with files are found here, where one clear line can report them.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_service.checkpoint.model_kind import check_declared_kind
from executor_service.errors import ModelUnreadable, ModelUnsupported, one_line
from executor_service.quantization import (
    GgufFile,
    WeightFormat,
    declared_format,
    gguf_config,
    gguf_header_bytes,
    read_gguf,
)
from splitserve_common import parse_json
from splitserve_options import (
    WEIGHT_FILES,
    NoCheckpoint,
    check_folder,
    check_special_kind,
    find_checkpoint,
)

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    # Of sentence-transformers: prompts, and whether texts are turned to lower case.
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
# Further chat templates, with their names as file names.
_TEMPLATES = "additional_chat_templates/*.jinja"
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
# Ends the name of a file of a set: `model-00001-of-00003`.
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_HUB_PATTERNS = (*_SMALL_FILES, "*.safetensors", "*_Dense/pytorch_model.bin")

# Files up to this size are hashed whole; of larger ones, evenly spread samples.
_WHOLE_FILE_BYTES = 16 * 2**20
_SAMPLE_BYTES = 64 * 2**10
_NUM_SAMPLES = 64
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory with a configuration and complete weight files.

    `config`: the unchanged contents of config.json. `weight_format`: of its quantised layers; None
    for a plain checkpoint. `gguf`: the model of a GGUF file, for which `config` was made.
    """

    directory: Path
    weight_files: tuple[Path, ...]
    config: Mapping[str, Any]
    weight_format: WeightFormat | None = None
    gguf: GgufFile | None = None

    @property
    def name(self) -> str:
        """Default model name: that of the directory or of the GGUF file."""
        if self.gguf is None:
            return self.directory.resolve().name
        return _PART.sub("", self.weight_files[0].stem)

    @property
    def path(self) -> Path:
        """Directory or first GGUF file, for messages."""
        return self.directory if self.gguf is None else self.weight_files[0]

    @property
    def quantization(self) -> str | None:
        """Format of the quantised weights in one word; None for a plain checkpoint."""
        if self.gguf is not None:
            is_quantised = any(tensor.is_quantised for tensor in self.gguf.tensors.values())
            return "gguf" if is_quantised else None
        return None if self.weight_format is None else self.weight_format.name

    @property
    def architectures(self) -> list[str]:
        """Classes of `transformers` that the configuration names, if any."""
        named = self.config.get("architectures")
        return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []

    @property
    def tokenizer_files(self) -> dict[str, Path]:
        """Existing files of the tokenizer, by their names relative to the directory."""
        paths = [self.directory / name for name in _TOKENIZER_FILES]
        paths += sorted(self.directory.glob(_TEMPLATES))
        return {
            path.relative_to(self.directory).as_posix(): path for path in paths if path.is_file()
        }

    def digest(self) -> str:
        """Returns a lower-case hex SHA-256 that distinguishes checkpoints.

        It covers `config.json` in full, and of each weight file its name, its size and its content:
        files up to 16 MiB whole, larger ones as their header and 64 samples of 64 KiB,
        the last bytes included. So it notices another model, dtype, shape or training run, but not
        single bytes changed between two samples. Reading terabytes at each start would cost
        minutes.
        """
        sha256 = hashlib.sha256()
        config = () if self.gguf is not None else (self.directory / "config.json",)
        for path in (*config, *self.weight_files):
            size = path.stat().st_size
            sha256.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                for start, length in _sampled_ranges(path, size):
                    file.seek(start)
                    sha256.update(file.read(length))
        return sha256.hexdigest()


def check_directory(model: str) -> None:
    """Raises the errors of `resolve_checkpoint` that the files of a directory alone show.

    It needs neither `transformers`, which takes seconds to import, nor the hub. If `model` is not a
    directory, it checks nothing.
    """
    try:
        directory = find_checkpoint(model)
    except NoCheckpoint as error:
        raise ModelUnreadable(str(error)) from error
    if directory is not None and directory.suffix == ".gguf":
        gguf_config(read_gguf(directory))
    elif directory is not None:
        weight_format = declared_format(directory, _read_json(directory / "config.json"))
        _check_files(directory, weight_format)


def resolve_checkpoint(model: str, *, is_known: bool = False) -> Checkpoint:
    """Finds the checkpoint `model`: a directory, or a model id of the Hugging Face hub.

    `is_known`: does not ask `transformers` about the type of model. Raises ModelUnreadable if it is
    missing, incomplete or broken, and ModelUnsupported for a kind of checkpoint that is not served.
    """
    try:
        directory = find_checkpoint(model) or _download(model)
        if directory.suffix == ".gguf":
            gguf = read_gguf(directory)
            return Checkpoint(directory.parent, gguf.paths, gguf_config(gguf), gguf=gguf)
        check_folder(directory)
    except NoCheckpoint as error:
        raise ModelUnreadable(str(error)) from error
    config = _read_json(directory / "config.json") if is_known else _read_config(directory)
    weight_format = declared_format(directory, config)
    files = _check_files(directory, weight_format)
    return Checkpoint(directory, files, config, weight_format)


def _download(model: str) -> Path:
    """Downloads a checkpoint from the hub and returns its directory.

    Raises NoCheckpoint and ModelUnsupported before it fetches the weights.
    """
    directory = _snapshot(model, _SMALL_FILES)
    check_special_kind(directory)
    if (directory / "config.json").is_file():
        _read_config(directory)
    return _snapshot(model, _HUB_PATTERNS)


def _snapshot(model: str, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(patterns)))
    except Exception as error:
        # Hub, HTTP and file errors share no base class; all mean the same here.
        raise ModelUnreadable(
            f"{model}: no such directory, and not available from the hub ({one_line(error)})"
        ) from error


def _read_config(directory: Path) -> dict[str, Any]:
    """Returns the contents of config.json. Raises ModelUnsupported if they rule out serving."""
    config = _read_json(directory / "config.json")
    declared_format(directory, config)
    check_declared_kind(directory, config)
    return config


def _check_files(directory: Path, weight_format: WeightFormat | None) -> tuple[Path, ...]:
    """Returns the weight files of `directory`, sorted, after checking that each is complete.

    `weight_format`: of the quantised layers; None if there are none.
    """
    for single, index in WEIGHT_FILES:
        if (directory / single).is_file():
            files: tuple[Path, ...] = (directory / single,)
        elif (directory / index).is_file():
            files = _shards(directory / index)
        else:
            continue
        num_quantised = [
            _check_safetensors(path, weight_format)
            for path in files
            if path.suffix == ".safetensors"
        ]
        if weight_format is not None and num_quantised and not any(num_quantised):
            raise ModelUnsupported(
                f"{directory}: quantised with {weight_format.name}, but no tensor of the weights"
                " is, not served; supported: this checkpoint without its quantization_config"
            )
        return files
    raise ModelUnreadable(f"{directory}: no weights (the path of that name is not a file)")


def _shards(index_path: Path) -> tuple[Path, ...]:
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelUnreadable(f"{index_path}: has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ModelUnreadable(
                f"{index_path}: {tensor} is in {name!r}, which is not a file name"
            )
    paths = tuple(index_path.parent / name for name in sorted(set(weight_map.values())))
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelUnreadable(
            f"{index_path.parent}: {len(missing)} of {len(paths)} weight files are missing,"
            f" the first is {missing[0]}"
        )
    return paths


def _check_safetensors(path: Path, weight_format: WeightFormat | None) -> int:
    """Compares the file with its header, and returns the number of its quantised tensors.

    Raises ModelUnreadable if it is corrupt or truncated, ModelUnsupported if a tensor is quantised
    and the checkpoint does not declare that.
    """
    size = path.stat().st_size
    header_bytes = _header_bytes(path)
    try:
        with path.open("rb") as file:
            file.seek(8)
            header = parse_json(file.read(header_bytes))
        header.pop("__metadata__", None)
        data_bytes = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        num_quantised = check_dtypes(path, header, weight_format)
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ModelUnreadable(f"{path}: the safetensors header is corrupt") from error
    expected = 8 + header_bytes + data_bytes
    if size != expected:
        problem = "truncated" if size < expected else "corrupt"
        raise ModelUnreadable(f"{path}: {problem}, {size} bytes where {expected} are expected")
    return num_quantised


def _header_bytes(path: Path) -> int:
    """Returns the length in bytes of the JSON header of a safetensors file."""
    with path.open("rb") as file:
        prefix = file.read(8)
    if len(prefix) < 8:
        raise ModelUnreadable(f"{path}: truncated, only {len(prefix)} bytes")
    length = int(struct.unpack("<Q", prefix)[0])
    if length > _MAX_HEADER_BYTES:
        raise ModelUnreadable(f"{path}: the safetensors header is corrupt")
    return length


def _sampled_ranges(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yields (start, length) of the parts of a file that the digest covers."""
    if size <= _WHOLE_FILE_BYTES:
        yield 0, size
        return
    if path.suffix == ".safetensors":
        yield 0, 8 + _header_bytes(path)
    elif path.suffix == ".gguf":
        yield 0, gguf_header_bytes(path)
    for sample in range(_NUM_SAMPLES):
        yield sample * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1), _SAMPLE_BYTES


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{path}: not readable as JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise ModelUnreadable(f"{path}: not a JSON object")
    return content


# -- Detection of quantised tensors ----------------------------------------------------------------
#
# Read as plain numbers, quantised weights would be another model; so a checkpoint with tensors of
# such dtypes has to declare its format (`declared_format`).

_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
# Masks and tables of positions have these dtypes, too, so a matrix is recognised by its name.
_INTEGER_DTYPES = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
_MATRIX = re.compile(r"(weight|packed|proj|blocks|scales|zeros)$")


def check_dtypes(path: Path, tensors: Mapping[str, Any], weight_format: WeightFormat | None) -> int:
    """Returns the number of quantised tensors of a file.

    `tensors`: the header of the safetensors file `path`. Raises ModelUnsupported for one that
    `weight_format` does not know.
    """
    num_quantised = 0
    for name, tensor in tensors.items():
        dtype = tensor["dtype"]
        is_matrix = len(tensor["shape"]) > 1 and _MATRIX.search(name)
        if dtype in _PLAIN_DTYPES:
            continue
        if weight_format is not None and weight_format.part_of(name) is not None:
            num_quantised += 1
        elif dtype not in _INTEGER_DTYPES or is_matrix:
            says = "does not say how" if weight_format is None else f"names {weight_format.name}"
            raise ModelUnsupported(
                f"{path}: quantised, but config.json {says}: {name} is {dtype}, not served;"
                " supported: this checkpoint with its own quantization_config"
            )
    return num_quantised
