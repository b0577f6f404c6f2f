"""Format of a checkpoint's quantised layers, as its configuration declares it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from executor_service.errors import ModelUnsupported
from executor_service.quantization.bitsandbytes import BitsAndBytes
from executor_service.quantization.compressed_tensors import CompressedTensors
from executor_service.quantization.float8 import Float8
from executor_service.quantization.gptq import Awq, Gptq
from executor_service.quantization.mxfp4 import Mxfp4
from executor_service.quantization.weight_format import WeightFormat
from splitserve_common import parse_json

_FORMATS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Float8,
    "fp8": Float8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
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
_KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}


def declared_format(directory: Path, config: Mapping[str, Any]) -> WeightFormat | None:
    """Returns the format of the quantised layers; None for a plain checkpoint.

    `config`: contents of config.json in `directory`. A declaration about stored keys and values
    alone does not count. Raises ModelUnsupported for a format that is not read, and for stored keys
    and values of another kind than `read_kv_scales` reads.
    """
    for key, declared in _declarations(config):
        return _format(directory, key, declared)
    for name, method in _METHOD_OF_FILE.items():
        path = directory / name
        if path.is_file():
            declared = _read_object(path)
            return _format(directory, name, {"quant_method": method, **declared})
    return None


def _format(directory: Path, source: str, declared: object) -> WeightFormat:
    method = _method(source, declared)
    make = _FORMATS.get(str(method))
    if make is None or not isinstance(declared, dict):
        raise ModelUnsupported(
            f"{directory}: quantised: {_describe(source, declared)}, not served; supported:"
            f" {', '.join(_FORMATS)}, GGUF, and plain float32, bfloat16 and float16"
        )
    try:
        _check_kv_scheme(declared)
        return make(declared)
    except ModelUnsupported as error:
        raise ModelUnsupported(f"{directory}: quantised with {method}: {error}") from error


def _method(source: str, declared: object) -> str | None:
    """Returns the method's name, which some old declarations only imply."""
    if not isinstance(declared, dict):
        return None
    method = declared.get("quant_method")
    if isinstance(method, str):
        return method
    if declared.get("load_in_4bit") or declared.get("load_in_8bit"):
        return BitsAndBytes.name
    return CompressedTensors.name if source == "compression_config" else None


def _check_kv_scheme(declared: Mapping[str, Any]) -> None:
    """Raises ModelUnsupported for stored keys and values of another kind than is read."""
    scheme = declared.get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        return
    for name, allowed in _KV_SCHEME.items():
        if scheme.get(name) != allowed:
            raise ModelUnsupported(
                f"quantization_config.kv_cache_scheme.{name} is {json.dumps(scheme.get(name))}, not"
                f" served; supported: {json.dumps(allowed)}"
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
    if not isinstance(declared, dict) or declared.get("quant_method") != CompressedTensors.name:
        return False
    scheme = declared.get("kv_cache_scheme")
    if not isinstance(scheme, dict) or declared.get("config_groups"):
        return False
    return not declared.get("sparsity_config") and all(
        scheme.get(name) == value for name, value in _KV_SCHEME.items()
    )


def _describe(source: str, declared: object) -> str:
    """Returns the method and its bits, as far as they are declared."""
    if not isinstance(declared, dict):
        return f"{source} {json.dumps(declared)[:40]}"
    method = next((declared[k] for k in _METHOD_KEYS if isinstance(declared.get(k), str)), None)
    bits = next((declared[k] for k in _NUM_BITS_KEYS if isinstance(declared.get(k), int)), None)
    described = method or "by a method that it does not name"
    if bits is not None:
        described += f" with {bits} bits"
    return f"{described} ({source})"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
