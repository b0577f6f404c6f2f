"""Checkpoints whose weights are not plain numbers: found by what they declare and what they hold.

Read as if they were plain, they would be another model; so whatever says that it is quantised is
refused, known method or not. What only says how keys and values may be stored is no such thing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from executor_service.errors import ModelUnsupported

# Where a configuration says it. "quantization" is what MLX writes.
_CONFIG_KEYS = ("quantization_config", "quantization", "compression_config")
# Files beside config.json that say it.
_METHOD_OF_FILE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_METHOD_KEYS = ("quant_method", "quant_algo", "quant_type", "format")
_NUM_BITS_KEYS = ("bits", "w_bit", "nbits")
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
# Of these are masks and tables of positions, too; so the name has to say that it is a matrix.
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
    "not served; an unquantised checkpoint of the model would be (float32, bfloat16 or float16);"
    " on a CPU, --quantization int8 rounds the matrices of such a one"
)


def check_declared(directory: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelUnsupported if `config`, or a file beside it, says that weights are quantised.

    `config`: what config.json in `directory` holds.
    """
    for key, declared in _declarations(config):
        raise ModelUnsupported(f"{directory}: quantised: {_describe(key, declared)}, {_SERVED}")
    for name, method in _METHOD_OF_FILE.items():
        if (directory / name).is_file():
            raise ModelUnsupported(f"{directory}: quantised: {method} ({name}), {_SERVED}")


def check_dtypes(path: Path, tensors: Mapping[str, Any]) -> None:
    """Raises ModelUnsupported if a file of weights holds quantised ones, declared or not.

    `tensors`: the header of the safetensors file `path`.
    """
    for name, tensor in tensors.items():
        dtype = tensor["dtype"]
        is_matrix = len(tensor["shape"]) > 1 and _MATRIX.search(name)
        if dtype in _PLAIN_DTYPES or (dtype in _INTEGER_DTYPES and not is_matrix):
            continue
        raise ModelUnsupported(
            f"{path}: quantised, though config.json does not tell how: {name} is {dtype}, {_SERVED}"
        )


def _declarations(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of the model, then those of its parts (its text part, say)."""
    parts = [part for part in config.values() if isinstance(part, dict)]
    for part in (config, *parts):
        for key in _CONFIG_KEYS:
            # Even an empty one says that something was done.
            if part.get(key) is not None and not _is_of_kv_alone(part[key]):
                yield key, part[key]


def _is_of_kv_alone(declared: object) -> bool:
    """Whether compressed-tensors says of nothing but keys and values that they have 8 bits.

    One scale for each layer, calibrated: `kv_scales` reads those.
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
    """The method and its bits, as far as they are told."""
    if not isinstance(declared, dict):
        return f"{key} {json.dumps(declared)[:40]}"
    method = next((declared[k] for k in _METHOD_KEYS if isinstance(declared.get(k), str)), None)
    bits = next((declared[k] for k in _NUM_BITS_KEYS if isinstance(declared.get(k), int)), None)
    for num_bits in (4, 8):
        if declared.get(f"load_in_{num_bits}bit"):
            method, bits = method or "bitsandbytes", num_bits
    described = method or "by a method that it does not name"
    if bits is not None:
        described += f" with {bits} bits"
    return f"{described} ({key})"
