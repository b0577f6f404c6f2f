"""The executor's configuration, validated once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICES = ("auto", "cpu", "cuda")
_ATTENTION_BACKENDS = ("auto", "torch", "native", "triton", "flash-attn")
_CUDA_GRAPHS = ("auto", "off")
_QUANTIZATIONS = ("none", "int8")
_KV_CACHE_DTYPES = ("auto", "fp8")
_LOG_LEVELS = ("debug", "info", "warning", "error")


class ConfigInvalid(Exception):
    """A value that cannot be used; the message names field, value and what is allowed."""


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Everything the executor process reads. None: the executor's own choice.

    `model`: a checkpoint directory, or a model id of the Hugging Face hub. `block_size`: tokens.
    `memory_fraction`: of the device's memory. `num_host_blocks`: 0 for no swapping. `threads`: of
    the CPU. Addresses are `host:port`.
    """

    model: str
    served_model_name: str | None
    dtype: str
    device: str
    attention_backend: str
    cuda_graphs: str
    kv_cache_dtype: str
    deterministic: bool
    quantization: str
    block_size: int | None
    num_device_blocks: int | None
    memory_fraction: float | None
    num_host_blocks: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    threads: int | None
    listen: str
    advertise_address: str | None
    scheduler: str
    log_level: str
    exit_on_stdin_eof: bool

    @classmethod
    def from_options(cls, values: Mapping[str, object]) -> ExecutorConfig:
        """From parsed options. Raises ConfigInvalid; unknown and missing keys are errors too."""
        for name in sorted(values.keys() ^ {field.name for field in fields(cls)}):
            problem = "unknown option" if name in values else "missing"
            raise ConfigInvalid(f"{name}: {problem}")
        if values["num_device_blocks"] is not None and values["memory_fraction"] is not None:
            raise ConfigInvalid("num_device_blocks and memory_fraction exclude each other")
        checked: dict[str, Any] = {name: _CHECKS[name](name, values[name]) for name in values}
        return cls(**checked)


def _text(name: str, value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise _invalid(name, value, "a text that is not empty")


def _address(name: str, value: object) -> str:
    host, _, port = _text(name, value).rpartition(":")
    if host and port.isascii() and port.isdigit() and int(port) < 2**16:
        return f"{host}:{port}"
    raise _invalid(name, value, "host:port")


def _switch(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _invalid(name, value, "true or false")


def _one_of(choices: tuple[str, ...]) -> Callable[[str, object], str]:
    def check(name: str, value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        raise _invalid(name, value, f"one of {', '.join(choices)}")

    return check


def _at_least(low: int) -> Callable[[str, object], int]:
    def check(name: str, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**31:
            return value
        raise _invalid(name, value, f"an integer from {low} to {2**31 - 1}")

    return check


def _fraction(name: str, value: object) -> float:
    if isinstance(value, int | float) and math.isfinite(value) and 0 < value <= 1:
        return float(value)
    raise _invalid(name, value, "a number above 0, at most 1")


def _optional(check: Callable[[str, object], object]) -> Callable[[str, object], object]:
    return lambda name, value: None if value is None else check(name, value)


def _invalid(name: str, value: object, allowed: str) -> ConfigInvalid:
    return ConfigInvalid(f"{name}: {value!r} is not allowed; it takes {allowed}")


_CHECKS: Mapping[str, Callable[[str, object], object]] = {
    "model": _text,
    "served_model_name": _optional(_text),
    "dtype": _one_of(_DTYPES),
    "device": _one_of(_DEVICES),
    "attention_backend": _one_of(_ATTENTION_BACKENDS),
    "cuda_graphs": _one_of(_CUDA_GRAPHS),
    "kv_cache_dtype": _one_of(_KV_CACHE_DTYPES),
    "deterministic": _switch,
    "quantization": _one_of(_QUANTIZATIONS),
    "block_size": _optional(_at_least(1)),
    "num_device_blocks": _optional(_at_least(1)),
    "memory_fraction": _optional(_fraction),
    "num_host_blocks": _optional(_at_least(0)),
    "max_num_seqs": _at_least(1),
    "max_num_batched_tokens": _at_least(1),
    "max_model_len": _optional(_at_least(1)),
    "threads": _optional(_at_least(1)),
    "listen": _address,
    "advertise_address": _optional(_address),
    "scheduler": _address,
    "log_level": _one_of(_LOG_LEVELS),
    "exit_on_stdin_eof": _switch,
}
