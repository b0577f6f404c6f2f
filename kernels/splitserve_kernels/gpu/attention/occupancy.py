"""Properties of a GPU, and the number of programs of a kernel that run at a time."""

from __future__ import annotations

import functools

import torch
import triton

from splitserve_kernels.gpu.attention.tile_sizes import TileSizes
from splitserve_kernels.gpu.attention.tiles import AttentionConstants, is_float32
from splitserve_kernels.gpu.availability import is_interpreted

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
    itemsize = 4 if is_float32(constants) else 2
    head_dims = constants["BLOCK_D"] + constants["BLOCK_E"]
    keys = (sizes.num_stages - 1) * sizes.num_keys * head_dims
    queries = sizes.num_queries * (constants["BLOCK_D"] + sizes.num_keys)
    by_memory = shared_bytes // ((keys + queries) * itemsize + 2 * _RESERVED_BYTES)
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
def compute_capability(device: torch.device) -> int:
    """Returns the compute capability: 80 for 8.0.

    Without a GPU, returns that of the compilation target, or 80 if kernels are interpreted.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    if is_interpreted():
        return _CAPABILITY
    return int(triton.runtime.driver.active.get_current_target().arch)
