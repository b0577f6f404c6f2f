"""Library of compiled kernels, and the C structures of its calls.

Each structure mirrors the one of the same name in `native`, which documents the fields.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from splitserve_kernels.cpu.build import BuildFailed, best_variant, library_path
from splitserve_kernels.draw_rows import COLUMN_NAMES

_Pointer = ctypes.c_void_p
_I32 = ctypes.c_int32
_I64 = ctypes.c_int64
_F32 = ctypes.c_float
# `GoesOn` in decoder_run.h.
CGoesOn = ctypes.CFUNCTYPE(_I32, _I32)

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
DTYPES = frozenset(_SUFFIXES)
# Codes of keys and values: `KVFormat` in kv_codes.h. Pools of other dtypes are plain numbers.
_KV_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}
_LINE_BYTES = 64

# Parts of a decoder step: `StepPart` in step_clock.h.
STEP_PARTS = (
    "plan",
    "norms",
    "qkv",
    "kv_write",
    "attention",
    "attention_output",
    "gate_up",
    "down",
    "head",
    "draw",
)


class CLinear(ctypes.Structure):
    """Mirrors `Linear` in gemm.h."""

    _fields_ = (
        ("panels", _Pointer),
        ("bias", _Pointer),
        ("scales", _Pointer),
        ("kinds", _Pointer),
        ("starts", _Pointer),
        ("order", _Pointer),
        ("num_outputs", _I32),
        ("num_inputs", _I32),
        ("is_exact", _I32),
    )


class CGroupRows(ctypes.Structure):
    """Mirrors `GroupRows` in group_weights.h."""

    _fields_ = (
        ("codes", _Pointer),
        ("first", _Pointer),
        ("second", _Pointer),
        ("block_first", _Pointer),
        ("block_second", _Pointer),
        ("outputs", _Pointer),
        ("num_rows", _I32),
        ("num_inputs", _I32),
    )


class CKVBlocks(ctypes.Structure):
    """Mirrors `KVBlocks` in kv_blocks.h."""

    _fields_ = (
        ("block_size", _I32),
        ("num_kv_heads", _I32),
        ("key_dim", _I32),
        ("value_dim", _I32),
        ("format", _I32),
    )


class CAttentionLayer(ctypes.Structure):
    """Mirrors `AttentionLayer` in attention.h."""

    _fields_ = (
        ("query", _Pointer),
        ("keys", _Pointer),
        ("values", _Pointer),
        ("output", _Pointer),
        ("sinks", _Pointer),
        ("relative_bias", _Pointer),
        ("query_stride", _I64),
        ("key_stride", _I64),
        ("value_stride", _I64),
        ("num_heads", _I32),
        ("num_kv_heads", _I32),
        ("head_dim", _I32),
        ("value_dim", _I32),
        ("block_size", _I32),
        ("sliding_window", _I32),
        ("num_distances", _I32),
        ("kv_format", _I32),
        ("scale", _F32),
        ("softcap", _F32),
    )


class CAttentionRows(ctypes.Structure):
    """Mirrors `AttentionRows` in attention.h."""

    _fields_ = (
        ("block_tables", _Pointer),
        ("num_computed", _Pointer),
        ("query_starts", _Pointer),
        ("table_stride", _I64),
        ("num_rows", _I32),
    )


class CDecoderLayer(ctypes.Structure):
    """Mirrors `DecoderLayer` in decoder.h."""

    _fields_ = (
        ("qkv", CLinear),
        ("attention_output", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("input_norm", _Pointer),
        ("mlp_norm", _Pointer),
        ("query_norm", _Pointer),
        ("key_norm", _Pointer),
        ("sinks", _Pointer),
        ("sliding_window", _I32),
        ("softcap", _F32),
    )


class CDecoder(ctypes.Structure):
    """Mirrors `Decoder` in decoder.h."""

    _fields_ = (
        ("embedding", _Pointer),
        ("packed_embedding", CLinear),
        ("layers", _Pointer),
        ("head", CLinear),
        ("final_norm", _Pointer),
        ("num_layers", _I32),
        ("width", _I32),
        ("mlp_width", _I32),
        ("num_heads", _I32),
        ("num_kv_heads", _I32),
        ("head_dim", _I32),
        ("rotary_dim", _I32),
        ("epsilon", _F32),
        ("scale", _F32),
    )


class CLowRank(ctypes.Structure):
    """Mirrors `LowRank` in low_rank.h."""

    _fields_ = (
        ("down", _Pointer),
        ("scales", _Pointer),
        ("up", _Pointer),
        ("starts", _Pointer),
        ("first_words", _Pointer),
        ("num_words", _Pointer),
        ("bias", _Pointer),
        ("gain", _Pointer),
        ("num_ranks", _I32),
    )


class CAdapter(ctypes.Structure):
    """Mirrors `Adapter` in low_rank.h."""

    _fields_ = (
        ("linears", _Pointer),
        ("embedding", CLowRank),
        ("own_embedding", _Pointer),
        ("own_head", _Pointer),
    )


class CDecoderStep(ctypes.Structure):
    """Mirrors `DecoderStep` in decoder.h."""

    _fields_ = (
        ("token_ids", _Pointer),
        ("positions", _Pointer),
        ("slots", _Pointer),
        ("logits_index", _Pointer),
        ("cosines", _Pointer),
        ("sines", _Pointer),
        ("rows", CAttentionRows),
        ("key_pools", _Pointer),
        ("value_pools", _Pointer),
        ("block_stride", _I64),
        ("logits", _Pointer),
        ("part_ns", _Pointer),
        ("revealed", _Pointer),
        ("states", _Pointer),
        ("adapters", _Pointer),
        ("of_token", _Pointer),
        ("num_tokens", _I32),
        ("num_logits", _I32),
        ("block_size", _I32),
        ("num_threads", _I32),
        ("num_revealed", _I32),
        ("num_adapters", _I32),
        ("kv_format", _I32),
    )


class CSamplingRows(ctypes.Structure):
    """Mirrors `SamplingRows` in sampling.h."""

    _fields_ = tuple((name, _Pointer) for name in COLUMN_NAMES)


class CDecoderRun(ctypes.Structure):
    """Mirrors `DecoderRun` in decoder_run.h."""

    _fields_ = (
        ("draws", CSamplingRows),
        ("num_tokens", _Pointer),
        ("stop_offsets", _Pointer),
        ("stop_token_ids", _Pointer),
        ("tokens", _Pointer),
        ("max_num_tokens", _I32),
        ("vocab_size", _I32),
        ("goes_on", CGoesOn),
    )


class NativeLibrary:
    """Compiled library, with one version of each function per dtype in DTYPES.

    `part_ns`: [STEP_PARTS] int64, to which decoder steps add the nanoseconds of each part; None,
    the initial value, turns the measurement off.
    """

    def __init__(self, path: Path, variant: str) -> None:
        """Loads the library.

        Raises OSError if that fails. `variant`: name of its instruction set.
        """
        self.variant = variant
        self.part_ns: Tensor | None = None
        self._library = ctypes.CDLL(str(path))
        self.panel = int(self._library.splitserve_panel())
        self.lanes = int(self._library.splitserve_lanes())

    def group_panel_bytes(self, kind: int, num_inputs: int) -> int:
        """Returns the bytes of a panel of a kind of groups (group_weights.h)."""
        function = self._library.splitserve_group_panel_bytes
        function.restype = ctypes.c_int64
        return int(function(_I32(kind), _I32(num_inputs)))

    def cleared_panels(self, num_bytes: int) -> Tensor:
        """Returns zeroed memory in large pages that begins at a line of the cache."""
        memory = torch.empty(num_bytes + _LINE_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % _LINE_BYTES
        panels = memory[start : start + num_bytes]
        self._library.splitserve_clear_panels(pointer(panels), _I64(num_bytes))
        return panels

    def pack_groups(self, *arguments: object) -> None:
        """Calls splitserve_pack_groups; releases Python's lock meanwhile."""
        self._library.splitserve_pack_groups(*arguments)

    def call(self, name: str, dtype: torch.dtype, *arguments: object) -> None:
        """Calls splitserve_<name>_<dtype>; releases Python's lock meanwhile."""
        getattr(self._library, f"splitserve_{name}_{_SUFFIXES[dtype]}")(*arguments)


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Returns the address of the data of `tensor`, null for None. The caller keeps it alive."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def kv_format(dtype: torch.dtype) -> int:
    """Returns the `KVFormat` of pools of `dtype`; 0 for the dtype of the activations."""
    return _KV_FORMATS.get(dtype, 0)


@cache
def load_library() -> NativeLibrary:
    """Returns the library for this machine; compiles it if needed. Raises BuildFailed."""
    variant = best_variant()
    path = library_path(variant, _torch_openmp())
    try:
        return NativeLibrary(path, variant.name)
    except OSError as error:
        raise BuildFailed(f"{path} cannot be loaded: {error}") from error


def _torch_openmp() -> Path | None:
    """Returns torch's OpenMP library: with it, kernels and torch share one thread pool."""
    directory = Path(torch.__file__).parent / "lib"
    return next(iter(sorted(directory.glob("libgomp*"))), None)
