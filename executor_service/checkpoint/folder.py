"""Checks of a checkpoint directory before `transformers` reads it, and its digest.

All problems with files are found here, where one clear line can report them.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_service.checkpoint.model_kind import check_declared_kind
from executor_service.errors import ModelUnreadable, ModelUnsupported, one_line
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
)
# Further chat templates, with their names as file names.
_TEMPLATES = "additional_chat_templates/*.jinja"
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
_HUB_PATTERNS = (*_SMALL_FILES, "*.safetensors")

# Files up to this size are hashed whole; of larger ones, evenly spread samples.
_WHOLE_FILE_BYTES = 16 * 2**20
_SAMPLE_BYTES = 64 * 2**10
_NUM_SAMPLES = 64
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory with a configuration and complete weight files.

    `config`: the unchanged contents of config.json.
    """

    directory: Path
    weight_files: tuple[Path, ...]
    config: Mapping[str, Any]

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
        files up to 16 MiB whole, larger ones as their safetensors header and 64 samples of 64 KiB,
        the last bytes included. So it notices another model, dtype, shape or training run, but not
        single bytes changed between two samples. Reading terabytes at each start would cost
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


def check_directory(model: str) -> None:
    """Raises the errors of `resolve_checkpoint` that the files of a directory alone show.

    It needs neither `transformers`, which takes seconds to import, nor the hub. If `model` is not a
    directory, it checks nothing.
    """
    try:
        directory = find_checkpoint(model)
    except NoCheckpoint as error:
        raise ModelUnreadable(str(error)) from error
    if directory is not None:
        check_declared(directory, _read_json(directory / "config.json"))
        _check_files(directory)


def resolve_checkpoint(model: str) -> Checkpoint:
    """Finds the checkpoint `model`: a directory, or a model id of the Hugging Face hub.

    Raises ModelUnreadable if it is missing, incomplete or broken, and ModelUnsupported for a kind
    of checkpoint that is not served.
    """
    try:
        directory = find_checkpoint(model) or _download(model)
        check_folder(directory)
    except NoCheckpoint as error:
        raise ModelUnreadable(str(error)) from error
    config = _read_config(directory)
    return Checkpoint(directory, _check_files(directory), config)


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
    check_declared(directory, config)
    check_declared_kind(directory, config)
    return config


def _check_files(directory: Path) -> tuple[Path, ...]:
    """Returns the weight files of `directory`, sorted, after checking that each is complete."""
    for single, index in WEIGHT_FILES:
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


def _check_safetensors(path: Path) -> None:
    """Compares the file with its header.

    Raises ModelUnreadable if it is corrupt or truncated, ModelUnsupported if it is quantised.
    """
    size = path.stat().st_size
    header_bytes = _header_bytes(path)
    try:
        with path.open("rb") as file:
            file.seek(8)
            header = parse_json(file.read(header_bytes))
        header.pop("__metadata__", None)
        data_bytes = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        check_dtypes(path, header)
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ModelUnreadable(f"{path}: the safetensors header is corrupt") from error
    expected = 8 + header_bytes + data_bytes
    if size != expected:
        problem = "truncated" if size < expected else "corrupt"
        raise ModelUnreadable(f"{path}: {problem}, {size} bytes where {expected} are expected")


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


# -- Detection of quantised checkpoints ------------------------------------------------------------
#
# They are found by their declarations and by their tensors. Read as plain numbers, quantised
# weights would be another model; so every checkpoint that declares quantisation is refused, known
# method or not. A declaration about stored keys and values alone does not count.

# Configuration keys that declare quantisation. MLX writes "quantization".
_CONFIG_KEYS = ("quantization_config", "quantization", "compression_config")
# Files beside config.json that declare quantisation.
_METHOD_OF_FILE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_METHOD_KEYS = ("quant_method", "quant_algo", "quant_type", "format")
_NUM_BITS_KEYS = ("bits", "w_bit", "nbits")
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
# Masks and tables of positions have these dtypes, too, so a matrix is recognised by its name.
_INTEGER_DTYPES = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
_MATRIX = re.compile(r"(weight|packed|proj|blocks|scales|zeros)$")
_KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}
_SERVED = (
    "not served; supported: an unquantised checkpoint of the model (float32, bfloat16 or float16);"
    " on a CPU, --quantization int8 quantises its matrices"
)


def check_declared(directory: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelUnsupported if `config`, or a file beside it, declares quantised weights.

    `config`: contents of config.json in `directory`.
    """
    for key, declared in _declarations(config):
        raise ModelUnsupported(f"{directory}: quantised: {_describe(key, declared)}, {_SERVED}")
    for name, method in _METHOD_OF_FILE.items():
        if (directory / name).is_file():
            raise ModelUnsupported(f"{directory}: quantised: {method} ({name}), {_SERVED}")


def check_dtypes(path: Path, tensors: Mapping[str, Any]) -> None:
    """Raises ModelUnsupported if a file holds quantised weights, declared or not.

    `tensors`: the header of the safetensors file `path`.
    """
    for name, tensor in tensors.items():
        dtype = tensor["dtype"]
        is_matrix = len(tensor["shape"]) > 1 and _MATRIX.search(name)
        if dtype in _PLAIN_DTYPES or (dtype in _INTEGER_DTYPES and not is_matrix):
            continue
        raise ModelUnsupported(
            f"{path}: quantised, but config.json does not say how: {name} is {dtype}, {_SERVED}"
        )


def _declarations(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the declarations of the model, then those of its parts, such as its text part."""
    parts = [part for part in config.values() if isinstance(part, dict)]
    for part in (config, *parts):
        for key in _CONFIG_KEYS:
            # Even an empty declaration means quantisation.
            if part.get(key) is not None and not _is_of_kv_alone(part[key]):
                yield key, part[key]


def _is_of_kv_alone(declared: object) -> bool:
    """Returns whether compressed-tensors declares only 8-bit keys and values.

    There must be one calibrated scale for each layer, which `read_kv_scales` reads.
    """
    if not isinstance(declared, dict) or declared.get("quant_method") != "compressed-tensors":
        return False
    scheme = declared.get("kv_cache_scheme")
    if not isinstance(scheme, dict) or declared.get("config_groups"):
        return False
    return not declared.get("sparsity_config") and all(
        scheme.get(name) == value for name, value in _KV_SCHEME.items()
    )


def _describe(key: str, declared: object) -> str:
    """Returns the method and its bits, as far as they are declared."""
    if not isinstance(declared, dict):
        return f"{key} {json.dumps(declared)[:40]}"
    method = next((declared[k] for k in _METHOD_KEYS if isinstance(declared.get(k), str)), None)
    bits = next((declared[k] for k in _NUM_BITS_KEYS if isinstance(declared.get(k), int)), None)
    for num_bits in (4, 8):
        if declared.get(f"load_in_{num_bits}bit"):
            method, bits = method or "bitsandbytes", num_bits
    described = method or "unnamed method"
    if bits is not None:
        described += f" with {bits} bits"
    return f"{described} ({key})"
