"""How many KV blocks fit, and a runner that has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from executor_service.errors import OutOfMemory
from executor_service.kv_cache import KVCache, block_bytes
from executor_service.loaded_model import LoadedModel
from executor_service.model_runner import ModelRunner
from executor_service.paged_model import PagedModel, TransformersModel
from executor_service.sampler import Draw, draw_in_torch
from splitserve_kernels import reference

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
_MEMINFO = Path("/proc/meminfo")
_FALLBACK_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes of the pools.

    `block_size`: tokens per block. `num_device_blocks`: None for as many as fit: on a GPU, what
    `memory_ratio` of its memory leaves beside the weights; on a CPU, `memory_ratio` of the
    memory that is available now, but no more than `max_cpu_pool_bytes`. `num_host_blocks`: None
    for as many as on the device, but no more than `host_memory_ratio` of the host memory that is
    available and that the device pool leaves; 0 for no swapping. A number that is not given stays
    at or below `max_auto_blocks`: the scheduler keeps books on every block.
    """

    block_size: int = 16
    num_device_blocks: int | None = None
    num_host_blocks: int | None = None
    memory_ratio: float = 0.9
    max_cpu_pool_bytes: int = 4 * 2**30
    host_memory_ratio: float = 0.25
    max_auto_blocks: int = 2**17


MakeModel = Callable[[LoadedModel, KVCache], PagedModel]


def torch_model(loaded: LoadedModel, cache: KVCache) -> PagedModel:
    """The model as `transformers` has it, attending in plain torch."""
    return TransformersModel(loaded, cache, reference)


def build_runner(
    loaded: LoadedModel,
    cache_config: CacheConfig,
    make_model: MakeModel = torch_model,
    draw: Draw = draw_in_torch,
) -> ModelRunner:
    """Allocates the pools and makes a runner for `loaded`, which `draw` chooses tokens for.

    Raises OutOfMemory, with the numbers, if the pools or a single block do not fit.
    """
    size = block_bytes(loaded.layers, cache_config.block_size, loaded.kv_dtype)
    num_device_blocks = cache_config.num_device_blocks
    if num_device_blocks is None:
        fitting = _fitting_blocks(loaded.device, cache_config, size)
        num_device_blocks = min(fitting, cache_config.max_auto_blocks)
    num_host_blocks = cache_config.num_host_blocks
    if num_host_blocks is None:
        fitting = _fitting_host_blocks(loaded.device, cache_config, size, num_device_blocks)
        num_host_blocks = min(fitting, num_device_blocks, cache_config.max_auto_blocks)
    if loaded.device.type == "cuda":
        _check_host_pool(num_host_blocks, size)
    cache = KVCache(
        layers=loaded.layers,
        block_size=cache_config.block_size,
        num_device_blocks=num_device_blocks,
        num_host_blocks=num_host_blocks,
        dtype=loaded.kv_dtype,
        device=loaded.device,
    )
    return ModelRunner(loaded, cache, make_model(loaded, cache), draw)


def _fitting_blocks(device: torch.device, cache_config: CacheConfig, size: int) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What the ratio leaves out is for activations and for other users of the device.
        budget = int(free - (1 - cache_config.memory_ratio) * total)
    else:
        free = available_host_bytes()
        budget = min(int(free * cache_config.memory_ratio), cache_config.max_cpu_pool_bytes)
    if budget < size:
        raise OutOfMemory(
            f"no room for KV blocks: one takes {size} bytes, {free} bytes are free on {device} and"
            f" {max(budget, 0)} of them may be used (memory ratio {cache_config.memory_ratio})"
        )
    return budget // size


def _fitting_host_blocks(
    device: torch.device, cache_config: CacheConfig, size: int, num_device_blocks: int
) -> int:
    free = available_host_bytes()
    if device.type != "cuda":
        free -= num_device_blocks * size
    return max(0, int(free * cache_config.host_memory_ratio)) // size


def _check_host_pool(num_blocks: int, size: int) -> None:
    """Raises OutOfMemory. To pin memory is to use it all; too much of it ends the process."""
    free = available_host_bytes()
    if num_blocks * size > free:
        raise OutOfMemory(
            f"num_host_blocks: {num_blocks} blocks of {size} bytes"
            f" ({num_blocks * size / 2**30:.2f} GiB) do not fit into {free} bytes that are free"
        )


def available_host_bytes() -> int:
    """Bytes that can still be allocated here: what the system has, within the container's limit."""
    limits = [
        int(line.split()[1]) * 1024
        for line in _read(_MEMINFO).splitlines()
        if line.startswith("MemAvailable:")
    ]
    limit, used = _read(_CGROUP_LIMIT).strip(), _read(_CGROUP_USED).strip()
    if limit.isdigit() and used.isdigit():
        limits.append(max(0, int(limit) - int(used)))
    return min(limits, default=_FALLBACK_BYTES)


def _read(path: Path) -> str:
    """Content of a file of the kernel; empty where there is no such file."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
