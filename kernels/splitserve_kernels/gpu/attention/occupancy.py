"""What a GPU is, and how many programs of a kernel it runs at a time."""

from __future__ import annotations

import functools

import torch
import triton

from splitserve_kernels.gpu.attention.tile_sizes import TileSizes
from splitserve_kernels.gpu.attention.tiles import AttentionConstants, is_float32
from splitserve_kernels.gpu.availability import is_interpreted

# What is known of no device: that of an A100, the smallest that attention is made for.
_SHARED_MEMORY_BYTES = 164 * 1024
_CAPABILITY = 80
# What a multiprocessor keeps for itself, of each program.
_RESERVED_BYTES = 1024


def num_programs_at_once(
    device: torch.device, constants: AttentionConstants, sizes: TileSizes
) -> int:
    """Programs of a decode that the device runs at a time."""
    programs = programs_per_multiprocessor(shared_memory_bytes(device), constants, sizes)
    return num_multiprocessors(device) * programs


def programs_per_multiprocessor(
    shared_bytes: int, constants: AttentionConstants, sizes: TileSizes
) -> int:
    """Of a decode, by shared memory and registers; rather one too few, which costs less.

    `tests/kernels/gpu/compiled` holds it against what compiled kernels take.
    """
    itemsize = 4 if is_float32(constants) else 2
    head_dims = constants["BLOCK_D"] + constants["BLOCK_E"]
    keys = (sizes.num_stages - 1) * sizes.num_keys * head_dims
    queries = sizes.num_queries * (constants["BLOCK_D"] + sizes.num_keys)
    by_memory = shared_bytes // ((keys + queries) * itemsize + 2 * _RESERVED_BYTES)
    by_registers = 1 if sizes.num_warps > 4 else 3 if head_dims <= 384 else 2
    return max(1, min(by_memory, by_registers))


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """Of a multiprocessor."""
    if device.type != "cuda":
        return _SHARED_MEMORY_BYTES
    size: int = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return size


@functools.cache
def compute_capability(device: torch.device) -> int:
    """80 for 8.0; without a GPU that of the one that is compiled for, if kernels are compiled."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    if is_interpreted():
        return _CAPABILITY
    return int(triton.runtime.driver.active.get_current_target().arch)
