"""How long a backend takes to attend: a step of decodes, and a chunk of a prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from executor_service.attention import AttentionBackend
from executor_service.attention_check import LayerKind, layer_kinds
from executor_service.kv_cache import KVCache, block_bytes
from executor_service.loaded_model import LoadedModel
from splitserve_kernels.paged_batch import build_paged_batch

_MAX_NUM_DECODES = 64
_MAX_POOL_BYTES = 2**29
_NUM_COMPUTED = 2048
_NUM_PROMPT_TOKENS = 1024
_NUM_RUNS = 5
# One after the other without waiting, so that the device is timed and not what launches.
_CALLS_PER_RUN = 10


@torch.inference_mode()
def time_attention(backend: AttentionBackend, loaded: LoadedModel, block_size: int) -> float:
    """Seconds for up to 64 decodes and a chunk of 1024 tokens, each behind 2048, in one layer.

    Of a model with several kinds of layers, the first kind.
    """
    kind = layer_kinds(loaded)[0]
    row_bytes = block_bytes([kind.layer], _NUM_COMPUTED, loaded.kv_dtype)
    num_decodes = max(1, min(_MAX_NUM_DECODES, _MAX_POOL_BYTES // row_bytes))
    time_s = _time_rows(backend, kind, loaded, block_size, (num_decodes, 1))
    time_s += _time_rows(backend, kind, loaded, block_size, (1, _NUM_PROMPT_TOKENS))
    # What torch keeps for later would be missing when the KV blocks are counted.
    torch.cuda.empty_cache()
    return time_s


def _time_rows(
    backend: AttentionBackend,
    kind: LayerKind,
    loaded: LoadedModel,
    block_size: int,
    rows: tuple[int, int],
) -> float:
    """Seconds for so many rows with so many new tokens each."""
    num_rows, num_new = rows
    layer, device = kind.layer, loaded.device
    width = -(-(_NUM_COMPUTED + num_new) // block_size)
    cache = KVCache([layer], block_size, num_rows * width, 0, loaded.kv_dtype, device)
    batch = build_paged_batch(
        torch.arange(num_rows * width).view(num_rows, width),
        torch.full((num_rows,), _NUM_COMPUTED),
        torch.full((num_rows,), num_new),
        block_size,
        device,
    )
    shape = (num_rows * num_new, kind.num_heads, layer.key_dim)
    query = torch.ones(shape, dtype=loaded.dtype, device=device)
    key_pool, value_pool = cache.key_pools[0], cache.value_pools[0]

    def attend() -> None:
        for _ in range(_CALLS_PER_RUN):
            backend.paged_attention(query, key_pool, value_pool, batch, kind.options)

    attend()  # compiles
    return statistics.median(_elapsed_s(attend, device) for _ in range(_NUM_RUNS)) / _CALLS_PER_RUN


def _elapsed_s(run: Callable[[], None], device: torch.device) -> float:
    started = _now(device)
    run()
    return _now(device) - started


def _now(device: torch.device) -> float:
    """Seconds, once the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
