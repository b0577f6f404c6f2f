"""Candidates for attention on GPUs, with what keeps each from serving, and their timing.

Shape letters: R rows, M blocks of a block table, T input tokens, H query heads, G key/value heads,
D, E head sizes.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from executor_service.device import KVCache, LayerShape, block_bytes
from executor_service.model import LayerKind, LoadedModel, layer_kinds
from splitserve_kernels.gpu.attention.flash_attention_2_op import (
    PAGE_SIZE,
    FlashAttention2Missing,
    load_flash_attention_2,
    why_no_flash_attention_2_device,
    why_not_flash_attention_2,
)
from splitserve_kernels.gpu.attention.flash_attention_3_op import (
    INSTALLED,
    FlashAttention3Missing,
    FlashAttention3Op,
    load_flash_attention_3,
    why_no_flash_attention_3_device,
    why_not_flash_attention_3,
)
from splitserve_kernels.gpu.launch import why_unavailable
from splitserve_kernels.paged_batch import (
    AttentionBackend,
    AttentionOptions,
    build_paged_batch,
)

_MAX_NUM_DECODES = 64
_MAX_POOL_BYTES = 2**29
_NUM_TIMED_COMPUTED = 2048
_NUM_TIMED_PROMPT_TOKENS = 1024
_NUM_RUNS = 5
# Calls are launched without waiting between them, so that the device is timed and not the launches.
_CALLS_PER_RUN = 10


@torch.inference_mode()
def time_attention(backend: AttentionBackend, loaded: LoadedModel, block_size: int) -> float:
    """Returns the seconds that attention of one layer takes for three typical steps.

    These are up to 64 decodes, a chunk of 1024 tokens, and both in one step, each after 2048
    computed tokens. If a model has several kinds of layers, the first is timed.
    """
    kind = layer_kinds(loaded)[0]
    row_bytes = block_bytes([kind.layer], _NUM_TIMED_COMPUTED, loaded.kv_dtype)
    decodes = [1] * max(1, min(_MAX_NUM_DECODES, _MAX_POOL_BYTES // row_bytes))
    chunk = [_NUM_TIMED_PROMPT_TOKENS]
    time_s = sum(
        _time_rows(backend, kind, loaded, block_size, num_new)
        for num_new in (decodes, chunk, decodes + chunk)
    )
    # Memory that torch keeps cached would be missing when the KV blocks are counted.
    torch.cuda.empty_cache()
    return time_s


def _time_rows(
    backend: AttentionBackend,
    kind: LayerKind,
    loaded: LoadedModel,
    block_size: int,
    num_new: Sequence[int],
) -> float:
    """Returns the seconds of one attention call. `num_new`: new tokens of each row."""
    num_rows, layer, device = len(num_new), kind.layer, loaded.device
    width = -(-(_NUM_TIMED_COMPUTED + max(num_new)) // block_size)
    cache = KVCache([layer], block_size, num_rows * width, 0, loaded.kv_dtype, device)
    batch = build_paged_batch(
        torch.arange(num_rows * width).view(num_rows, width),
        torch.full((num_rows,), _NUM_TIMED_COMPUTED),
        torch.tensor(num_new),
        block_size,
        device,
    )
    shape = (sum(num_new), kind.num_heads, layer.key_dim)
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
    """Returns the time in seconds after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# -- Attention backends of GPUs --------------------------------------------------------------------
#
# Each candidate has its conditions on machine and model, and a factory. The reasons for the choice
# are in docs/adr/0007-gpu-backends.md.

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class LayerDemand:
    """A layer, its attention options, and the pools that it needs.

    `dtype`: of queries. `kv_dtype`, `block_size`: of the pools.
    """

    layer: LayerShape
    options: AttentionOptions
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int


# Returns the reason why a backend cannot serve a layer; None if it can.
WhyNotLayer = Callable[[LayerDemand], str | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that may serve. `name`: its name in --attention-backend.

    `why_absent` returns why it cannot run on this machine, `why_not_layer` why it cannot serve a
    layer; None if it can. `make` is called only if it can. `rounds_queries`: over float8 pools it
    rounds queries and weights to float8, too; then it serves only if it is asked for by name.
    `is_asked_for`: the operator configured it, so a refusal is logged as a warning. `block_size`:
    of its pools if it is asked for by name, and the operator gave none.
    """

    name: str
    make: Callable[[], AttentionBackend]
    why_absent: Callable[[], str | None]
    why_not_layer: WhyNotLayer = lambda _demand: None
    rounds_queries: bool = False
    is_asked_for: bool = False
    block_size: int = DEFAULT_BLOCK_SIZE

    def why_not(self, loaded: LoadedModel, block_size: int, *, is_named: bool = True) -> str | None:
        """Returns why the candidate cannot serve the model here; None if it can.

        `is_named`: it was asked for by name, and no other backend may serve.
        """
        if self.rounds(loaded) and not is_named:
            return (
                f"{self.name} rounds queries for {loaded.kv_dtype_name} keys and values:"
                " used only if requested by name"
            )
        reason = self.why_absent()
        for layer, options in zip(loaded.layers, loaded.layer_options, strict=True):
            demand = LayerDemand(layer, options, loaded.dtype, loaded.kv_dtype, block_size)
            if options.relative_bias is not None:
                reason = reason or "scores with a bias by distance: plain torch only, on GPUs"
            reason = reason or self.why_not_layer(demand)
        return reason

    def rounds(self, loaded: LoadedModel) -> bool:
        """Returns whether the backend rounds queries and weights over the pools of `loaded`."""
        return self.rounds_queries and loaded.kv_dtype.itemsize == 1


def gpu_candidates(flash_attention_3: str = INSTALLED) -> tuple[Candidate, ...]:
    """Returns the candidates; the first that can serve is the default.

    `flash_attention_3`: the source of that backend, see `load_flash_attention_3`.
    """
    triton = Candidate("triton", _make_triton, why_unavailable, _why_not_triton)
    return (_flash_attention_3(flash_attention_3), triton, _flash_attention_2())


def _make_triton() -> AttentionBackend:
    # The import needs Triton.
    from splitserve_kernels.gpu.attention import backend

    return backend


def _why_not_triton(demand: LayerDemand) -> str | None:
    if demand.kv_dtype.itemsize != 1 or not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability() < (8, 9):
        return "float8 keys and values: Triton requires compute capability 8.9 or later"
    return None


def _flash_attention_2() -> Candidate:
    def why_absent() -> str | None:
        reason = why_no_flash_attention_2_device() or why_unavailable()
        if reason is not None:
            return reason
        try:
            load_flash_attention_2()
        except FlashAttention2Missing as error:
            return str(error)
        return None

    def make() -> AttentionBackend:
        from splitserve_kernels.gpu.attention.flash_attention_2 import FlashAttention2

        return FlashAttention2(load_flash_attention_2())

    return Candidate(
        "flash-attn-2", make, why_absent, _why_not_flash_attention_2, block_size=PAGE_SIZE
    )


def _why_not_flash_attention_2(demand: LayerDemand) -> str | None:
    head_dims = (demand.layer.key_dim, demand.layer.value_dim)
    return why_not_flash_attention_2(head_dims, demand.dtype, demand.kv_dtype, demand.block_size)


def _flash_attention_3(source: str) -> Candidate:
    @functools.cache
    def load() -> FlashAttention3Op:
        return load_flash_attention_3(source)

    def why_absent() -> str | None:
        # On other devices nothing is loaded or downloaded.
        reason = why_no_flash_attention_3_device() or why_unavailable()
        if reason is not None:
            return reason
        try:
            load()
        except FlashAttention3Missing as error:
            return str(error)
        return None

    def make() -> AttentionBackend:
        from splitserve_kernels.gpu.attention.flash_attention_3 import FlashAttention3

        return FlashAttention3(load())

    return Candidate(
        "flash-attn-3",
        make,
        why_absent,
        _why_not_flash_attention_3,
        rounds_queries=True,
        is_asked_for=source != INSTALLED,
    )


def _why_not_flash_attention_3(demand: LayerDemand) -> str | None:
    return why_not_flash_attention_3(
        (demand.layer.key_dim, demand.layer.value_dim),
        demand.dtype,
        demand.kv_dtype,
        demand.block_size,
        demand.options.sliding_window,
        torch.cuda.get_device_capability(),
    )
