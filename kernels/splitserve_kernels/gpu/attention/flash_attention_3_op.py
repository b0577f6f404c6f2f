"""Operator of flash-attn 3 from any build: its limits, its schema and its sources.

Imports neither flash-attn nor Triton. A source (an installed package, the kernels hub, or a library
file) only has to register operators with torch. Operators are called by the argument names of their
schema. Arguments differ between builds (vLLM's build has sinks and parallel contexts, and no
defaults) and between versions. So this module checks the schema, not a version: the schema must
contain all arguments we pass, and any other required argument must have a neutral value.

Source of the limits: flash-attn 3 (the folder `hopper` of its repository, 2026), the checks of
`mha_fwd` in `flash_api.cpp`, and `tile_size.h`.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MAX_HEAD_DIM = 256
_DTYPES = (torch.float16, torch.bfloat16)
_FLOAT8 = torch.float8_e4m3fn
# From this block size on, flash-attn reads whole pages, including unwritten slots, which may hold
# NaN.
_MIN_WHOLE_PAGE = 64
# Ampere, Ada and Hopper have kernels, if the build has those of 8.x; only Hopper's do everything.
_AMPERE, _HOPPER = (8, 0), (9, 0)
# Prompts in windowed layers differed from float32 by 0.14 to 0.15 with heads of 128 and 256, and by
# 0.013 with heads of 64 (`make gpu-check`, part `correct`, the build of vLLM 0.33).
_MAX_WINDOWED_HEAD_DIM = 64


def why_not_flash_attention_3(
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    window: int | None,
    capability: tuple[int, int] = (9, 0),
) -> str | None:
    """Returns why flash-attn 3 cannot run heads of sizes (key, value); None if it can.

    `dtype`: of queries. `kv_dtype`: of keys and values. `capability`: the device's.
    """
    if block_size >= _MIN_WHOLE_PAGE:
        return (
            f"block_size {block_size}: flash-attn 3 reads such pages whole, unwritten slots too;"
            f" allowed: 1 to {_MIN_WHOLE_PAGE - 1}"
        )
    if dtype not in _DTYPES:
        return f"{dtype}: flash-attn 3 supports float16 and bfloat16 only"
    is_hopper = capability >= _HOPPER
    if kv_dtype != dtype and not (is_hopper and kv_dtype == _FLOAT8):
        also = f" and {_FLOAT8}" if is_hopper else " only, before compute capability 9.0"
        return f"keys and values in {kv_dtype}: flash-attn 3 supports {dtype}{also}"
    if window is not None and window < block_size:
        return f"a sliding window of {window} with blocks of {block_size}; allowed: a block or more"
    if window is not None and max(head_dims) > _MAX_WINDOWED_HEAD_DIM:
        return (
            f"a sliding window and head size {max(head_dims)}: flash-attn 3 computes prompts wrong"
            f" on an H100; allowed: sizes up to {_MAX_WINDOWED_HEAD_DIM}"
        )
    return _why_not_heads(*head_dims, is_float8=kv_dtype == _FLOAT8, is_hopper=is_hopper)


def _why_not_heads(key_dim: int, value_dim: int, *, is_float8: bool, is_hopper: bool) -> str | None:
    # Copies are 16 bytes wide.
    unit = 16 if is_float8 else 8
    if key_dim % unit or value_dim % unit or key_dim > _MAX_HEAD_DIM:
        return (
            f"key head size {key_dim} and value head size {value_dim}: flash-attn 3 supports"
            f" multiples of {unit}, keys up to {_MAX_HEAD_DIM}"
        )
    is_latent = 128 < key_dim <= 192 and 96 < value_dim <= 128
    is_wide = key_dim <= 64 and value_dim <= (256 if is_float8 else 512)
    if key_dim == value_dim or (is_hopper and (is_latent or is_wide)):
        return None
    return (
        f"key head size {key_dim} and value head size {value_dim}: flash-attn 3 does not support"
        f" this pair{'' if is_hopper else ' before compute capability 9.0'}"
    )


_FORWARD, _METADATA = "fwd", "get_scheduler_metadata"
_FORWARD_ARGUMENTS = frozenset(
    {
        "q",
        "k",
        "v",
        "out",
        "cu_seqlens_q",
        "seqused_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "page_table",
        "q_descale",
        "k_descale",
        "v_descale",
        "softmax_scale",
        "is_causal",
        "window_size_left",
        "window_size_right",
        "softcap",
        "scheduler_metadata",
        "num_splits",
    }
)
_METADATA_ARGUMENTS = frozenset(
    {
        "batch_size",
        "max_seqlen_q",
        "max_seqlen_k",
        "num_heads",
        "num_heads_k",
        "headdim",
        "headdim_v",
        "qkv_dtype",
        "seqused_k",
        "cu_seqlens_q",
        "page_size",
        "is_causal",
        "window_size_left",
        "window_size_right",
        "has_softcap",
        "num_splits",
    }
)
# Neutral values of arguments that have no default in some builds.
_NEUTRAL: dict[str, bool | int] = {
    "is_rotary_interleaved": True,
    "attention_chunk": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "max_seqlen_k_new": 0,
}


class FlashAttention3Unusable(ValueError):
    """Reports that the operator is missing or cannot be called; the message says why."""


class FlashAttention3Op:
    """Operators of flash-attn 3 in one namespace of `torch.ops`."""

    def __init__(self, namespace: Any) -> None:  # noqa: ANN401
        """Checks the operators.

        Raises FlashAttention3Unusable if one is missing or incompatible.
        """
        self._forward = _operator(namespace, _FORWARD)
        self._forward_rest = _rest(self._forward, _FORWARD_ARGUMENTS)
        self._metadata = _operator(namespace, _METADATA)
        self._metadata_rest = _rest(self._metadata, _METADATA_ARGUMENTS)

    def forward(self, **arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Computes attention in `out`. Returns it, and the log of each softmax's sum, [H, T].

        Takes all of _FORWARD_ARGUMENTS. `out`: [T, H, E], bfloat16 if queries are float8; tokens of
        no row stay as they are.
        """
        output, log_sums, *_ = self._forward(**self._forward_rest, **arguments)
        return output, log_sums

    def scheduler_metadata(self, **arguments: Any) -> Tensor:  # noqa: ANN401
        """Computes the scheduler metadata that `forward` would otherwise compute itself.

        Takes all of _METADATA_ARGUMENTS. The result is valid for all calls of `forward` with the
        same values of these arguments.
        """
        metadata: Tensor = self._metadata(**self._metadata_rest, **arguments)
        return metadata


def _operator(namespace: Any, name: str) -> Any:  # noqa: ANN401
    try:
        return getattr(namespace, name).default
    except AttributeError as error:
        named = getattr(namespace, "name", namespace)
        raise FlashAttention3Unusable(f"operator {named}.{name} is missing") from error


def _rest(operator: Any, passed: frozenset[str]) -> dict[str, bool | int | None]:  # noqa: ANN401
    """Returns neutral values of required arguments beyond `passed`.

    Raises FlashAttention3Unusable.
    """
    schema: torch.FunctionSchema = operator._schema
    missing = sorted(passed - {argument.name for argument in schema.arguments})
    if missing:
        raise FlashAttention3Unusable(f"{schema.name} has no argument {missing[0]}")
    rest: dict[str, bool | int | None] = {}
    for argument in schema.arguments:
        if argument.name in passed or argument.has_default_value():
            continue
        if isinstance(argument.type, torch.OptionalType):
            rest[argument.name] = None
        elif argument.name in _NEUTRAL:
            rest[argument.name] = _NEUTRAL[argument.name]
        else:
            raise FlashAttention3Unusable(
                f"{schema.name} requires an unknown argument {argument.name}"
            )
    return rest


INSTALLED, HUB = "installed", "hub"
# Modules of the repository's builds, by version; all use the same namespace.
_MODULES = ("flash_attn_3._C", "flash_attn_interface")
_NAMESPACE = "flash_attn_3"
_HUB_REPOSITORY, _HUB_VERSION = "kernels-community/flash-attn3", 1


class FlashAttention3Missing(Exception):
    """Reports that flash-attn 3 is missing or cannot be loaded.

    The message is one line for users.
    """


def load_flash_attention_3(source: str) -> FlashAttention3Op:
    """Loads the operators of `source`: INSTALLED, HUB (may download them), or a library's path.

    Raises FlashAttention3Missing.
    """
    try:
        if source == INSTALLED:
            namespace = _of_package()
        elif source == HUB:
            namespace = _of_hub()
        else:
            namespace = _of_file(Path(source))
        return FlashAttention3Op(namespace)
    except FlashAttention3Unusable as error:
        raise FlashAttention3Missing(f"flash-attn 3 ({source}): {error}") from error


def why_no_flash_attention_3_device() -> str | None:
    """Returns why the device cannot run flash-attn 3; None if a build may."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not _AMPERE <= torch.cuda.get_device_capability() <= _HOPPER:
        return "flash-attn 3 requires compute capability 8.0 to 9.0"
    return None


def _of_package() -> Any:  # noqa: ANN401
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError) as error:
            # Usually built for another torch version; the first line names the symbol.
            raise FlashAttention3Missing(
                f"flash-attn 3 cannot be imported: {_first_line(error)}"
            ) from error
        return getattr(torch.ops, _NAMESPACE)
    raise FlashAttention3Missing(
        f"flash-attn 3 is not installed: no module {' or '.join(_MODULES)}"
    )


def _of_hub() -> Any:  # noqa: ANN401
    try:
        get_kernel = importlib.import_module("kernels").get_kernel
    except (ImportError, AttributeError) as error:
        # Any folder of that name is importable as an empty module.
        raise FlashAttention3Missing(
            f"flash-attn 3 from the hub requires the package kernels: {_first_line(error)}"
        ) from error
    try:
        module = get_kernel(_HUB_REPOSITORY, version=_HUB_VERSION)
        # Each build has a namespace of its own, which this module holds.
        return importlib.import_module(f"{module.__name__}._ops").ops
    except Exception as error:  # hub, HTTP and file errors share no base class
        raise FlashAttention3Missing(
            f"{_HUB_REPOSITORY} cannot be fetched from the hub: {_first_line(error)}"
        ) from error


def _of_file(path: Path) -> Any:  # noqa: ANN401
    if not path.is_file():
        raise FlashAttention3Missing(f"flash-attn 3: no such file: {path}")
    registered = _registered_by(path.resolve())
    # A library loaded earlier registers nothing now; then its file or folder name gives the
    # namespace.
    for name in registered or (path.name.split(".")[0], path.parent.name, _NAMESPACE):
        if name.isidentifier() and hasattr(getattr(torch.ops, name), "fwd"):
            return getattr(torch.ops, name)
    raise FlashAttention3Missing(
        f"flash-attn 3: {path} registers no operator fwd: not a build of flash-attn 3;"
        f" registered namespaces: {', '.join(registered) or 'none'}"
    )


@functools.cache
def _registered_by(path: Path) -> tuple[str, ...]:
    """Loads the library at `path` and returns the namespaces of the operators that it registers.

    Cached, since a library registers its operators only when a process loads it for the first time.
    Raises FlashAttention3Missing.
    """
    before = _namespaces()
    untyped: Any = torch.ops
    try:
        untyped.load_library(path)
    except (OSError, RuntimeError) as error:
        raise FlashAttention3Missing(
            f"flash-attn 3: {path} cannot be loaded: {_first_line(error)}"
        ) from error
    return tuple(sorted(_namespaces() - before))


def _namespaces() -> set[str]:
    """Returns the namespaces of all operators registered with torch."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return {name.partition("::")[0] for name in names}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
