"""Tile sizes of attention that fit into registers and shared memory, and programs that run at once.

`tests/kernels/gpu/compiled` compiles them for six kinds of GPUs and checks the limits of
these sizes; timed on an H100 only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton

from splitserve_kernels.gpu.attention.tiles import (
    MIN_DOT_SIZE,
    AttentionConstants,
    is_float32,
)
from splitserve_kernels.gpu.launch import is_interpreted, next_power_of_2

_HOPPER = 90
# Its shared memory is that of Ada, and its matrix products, too, take operands from registers.
_SMALL_BLACKWELL = 120
# By compute capability, shared memory in KiB of one program at most; of others, the least there is.
_PROGRAM_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
_LEAST_PROGRAM_KIB = 99
_LEAST_KEYS = 16
_LEAST_STAGES = 2


@dataclass(frozen=True, slots=True)
class Target:
    """GPU for which tiles are sized.

    `capability`: compute capability, 90 for 9.0. `shared_bytes`: most shared memory of a program.
    """

    capability: int
    shared_bytes: int

    @classmethod
    def of(cls, capability: int) -> Target:
        """Returns the usual target of a compute capability."""
        return cls(capability, 1024 * _PROGRAM_KIB.get(capability, _LEAST_PROGRAM_KIB))

    @property
    def is_hopper(self) -> bool:
        """Whether products run by themselves, with operands in registers."""
        return self.capability // 10 * 10 == _HOPPER

    @property
    def is_narrow(self) -> bool:
        """Whether operands of matrix products are in registers rather than in shared memory."""
        return self.capability < _HOPPER or self.capability >= _SMALL_BLACKWELL


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Sizes of the tiles of an attention kernel.

    `num_queries`: M, tokens of a tile times its heads. `num_keys`: keys of a tile. `num_heads`:
    heads of a group per program; the next program takes the next heads. `num_stages`: key tiles in
    the pipeline, as the compiler counts. `overlaps`: products run during the softmax of other
    tiles, see `overlapped`.
    """

    num_queries: int
    num_heads: int
    num_keys: int
    num_warps: int
    num_stages: int
    overlaps: bool = False


def decode_tile_sizes(constants: AttentionConstants, target: Target) -> TileSizes:
    """Returns the tile sizes for rows of one token: M is the number of heads of a group."""
    head_dim = _head_dim(constants)
    most = 128 if head_dim <= 128 else 32 if head_dim <= 256 else 16
    num_queries = min(most, max(MIN_DOT_SIZE, next_power_of_2(constants["GROUP"])))
    sizes = TileSizes(
        num_queries=num_queries,
        num_heads=min(num_queries, constants["GROUP"]),
        num_keys=_num_keys(constants),
        num_warps=8 if num_queries > 32 or head_dim > 256 else 4,
        num_stages=3,
    )
    return _fitted(sizes, constants, target)


def prefill_tile_sizes(
    constants: AttentionConstants, max_num_new_tokens: int, target: Target
) -> TileSizes:
    """Returns the tile sizes for rows of up to `max_num_new_tokens` tokens.

    M is a power of two that holds the longest row, up to a limit.
    """
    head_dim = _head_dim(constants)
    if is_float32(constants):
        most = 32 if head_dim <= 64 else MIN_DOT_SIZE
    elif head_dim > 256:
        most = 32 if head_dim <= 512 else MIN_DOT_SIZE
    else:
        most = 64 if target.is_narrow and head_dim > 128 else 128
    wanted = next_power_of_2(constants["GROUP"] * max_num_new_tokens)
    num_queries = min(most, max(MIN_DOT_SIZE, wanted))
    is_wide = num_queries * head_dim > 64 * 128 or head_dim > 256 or is_float32(constants)
    num_keys = _num_keys(constants)
    if target.is_narrow and (constants["WINDOW"] or constants["SOFTCAP"]):
        num_keys = min(num_keys, 32)
    sizes = TileSizes(
        num_queries=num_queries,
        num_heads=min(num_queries, constants["GROUP"]),
        num_keys=num_keys,
        num_warps=8 if is_wide else 4,
        num_stages=3,
        # With fewer queries, and in float32, products do not run by themselves.
        overlaps=target.is_hopper and num_queries >= 64,
    )
    return _fitted(sizes, constants, target)


def _fitted(sizes: TileSizes, constants: AttentionConstants, target: Target) -> TileSizes:
    """Returns tiles with fewer keys, and then with a shorter pipeline, until a program has room."""
    while _program_bytes(constants, sizes) > target.shared_bytes:
        if sizes.num_keys > _LEAST_KEYS:
            sizes = replace(sizes, num_keys=sizes.num_keys // 2)
        elif sizes.num_stages > _LEAST_STAGES:
            sizes = replace(sizes, num_stages=sizes.num_stages - 1)
        else:
            break
    return sizes


def _program_bytes(constants: AttentionConstants, sizes: TileSizes) -> int:
    """Returns the shared memory of a program: tiles of keys and values, queries, and weights."""
    itemsize = 4 if is_float32(constants) else 2
    keys = (sizes.num_stages - 1) * sizes.num_keys * (constants["BLOCK_D"] + constants["BLOCK_E"])
    queries = sizes.num_queries * (constants["BLOCK_D"] + sizes.num_keys)
    return int((keys + queries) * itemsize)


def _head_dim(constants: AttentionConstants) -> int:
    return max(constants["BLOCK_D"], constants["BLOCK_E"])


def _num_keys(constants: AttentionConstants) -> int:
    """Returns the keys of a tile: shared memory holds two tiles of keys and values at a time."""
    itemsize = 4 if is_float32(constants) else 2
    bytes_of_key = (constants["BLOCK_D"] + constants["BLOCK_E"]) * itemsize
    if bytes_of_key <= 512 and not is_float32(constants):
        return 64
    return 32 if bytes_of_key <= 1024 else 16


# Values for an unknown device: those of an A100, the smallest GPU that attention is made for.
_SHARED_MEMORY_BYTES = 164 * 1024
_CAPABILITY = 80
# Shared memory that a multiprocessor reserves for each program.
_RESERVED_BYTES = 1024


def num_programs_at_once(
    device: torch.device, constants: AttentionConstants, sizes: TileSizes
) -> int:
    """Returns how many programs of a decode the device runs at a time."""
    programs = programs_per_multiprocessor(shared_memory_bytes(device), constants, sizes)
    return num_multiprocessors(device) * programs


def programs_per_multiprocessor(
    shared_bytes: int, constants: AttentionConstants, sizes: TileSizes
) -> int:
    """Returns the programs of a decode per multiprocessor, limited by shared memory and registers.

    Rather one too few than one too many, which costs more. `tests/kernels/gpu/compiled` compares
    the estimate with the usage of compiled kernels.
    """
    head_dims = constants["BLOCK_D"] + constants["BLOCK_E"]
    by_memory = shared_bytes // (_program_bytes(constants, sizes) + 2 * _RESERVED_BYTES)
    by_registers = 1 if sizes.num_warps > 4 else 3 if head_dims <= 384 else 2
    return max(1, min(by_memory, by_registers))


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; 1 if kernels are interpreted."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """Returns the bytes of shared memory of a multiprocessor."""
    if device.type != "cuda":
        return _SHARED_MEMORY_BYTES
    size: int = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return size


@functools.cache
def target_of(device: torch.device) -> Target:
    """Returns what sizes tiles for a device.

    Without a GPU, that of the compilation target, or an A100 if kernels are interpreted.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        usual = Target.of(10 * major + minor)
        properties = torch.cuda.get_device_properties(device)
        # Torch's stubs do not have it.
        found = getattr(properties, "shared_memory_per_block_optin", usual.shared_bytes)
        return replace(usual, shared_bytes=int(found))
    if is_interpreted():
        return Target.of(_CAPABILITY)
    return Target.of(int(triton.runtime.driver.active.get_current_target().arch))
