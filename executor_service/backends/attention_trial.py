"""Trial and timing of attention backends before they serve, and the candidates for GPUs.

Backends are compared with the reference in plain torch.

Shape letters: R rows, M blocks of a block table, T input tokens, H query heads, G key/value heads,
D, E head sizes.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_service.device.kv_cache import KVCache, LayerShape, block_bytes
from executor_service.errors import TrialFailed, one_line
from executor_service.model.loaded_model import LayerKind, LoadedModel, layer_kinds
from splitserve_kernels import reference
from splitserve_kernels.gpu.attention.flash_attention_3_op import FlashAttention3Op
from splitserve_kernels.gpu.attention.flash_attention_3_rules import why_not_flash_attention_3
from splitserve_kernels.gpu.attention.flash_attention_3_sources import (
    INSTALLED,
    FlashAttention3Missing,
    load_flash_attention_3,
    why_no_hopper,
)
from splitserve_kernels.gpu.availability import why_unavailable
from splitserve_kernels.paged_batch import (
    AttentionBackend,
    AttentionOptions,
    KVScales,
    build_paged_batch,
)

# Largest difference of an output, by the dtype of queries; outputs are averages of numbers of about
# 1. Float8 pools need no more: the reference has float8 pools, too, and both round to the nearest.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
# Limits for backends that round queries and weights to 8 bits: root mean square, single output.
_ROUNDED_TOLERANCE, _ROUNDED_OUTLIER = 0.02, 0.5
# Scales of float8 pools, so that a backend that ignores them fails; most numbers fit with these.
_FLOAT8_SCALES = KVScales(key=0.07, value=0.04)
# A decode, a decode far beyond the window, the end of a short prompt, a chunk after a prefix.
# Decodes come first, as in a step, because a backend may compute them apart.
_NUM_COMPUTED = (40, 150, 1, 33)
_NUM_NEW = (1, 1, 37, 20)
# Padding tokens without a row, as in a recorded step. Backends choose kernels by the number of
# tokens: with these tokens a GPU is full, without them it is not.
_NUM_ADDED_TOKENS = 8192
_MAX_NUM_DECODES = 64
_MAX_POOL_BYTES = 2**29
_NUM_TIMED_COMPUTED = 2048
_NUM_TIMED_PROMPT_TOKENS = 1024
_NUM_RUNS = 5
# Calls are launched without waiting between them, so that the device is timed and not the launches.
_CALLS_PER_RUN = 10


def try_backend(
    backend: AttentionBackend, loaded: LoadedModel, block_size: int, *, rounds_queries: bool = False
) -> None:
    """Compares outputs with the reference's on random rows, for each kind of layer of `loaded`.

    `rounds_queries`: the backend rounds queries and weights to 8 bits, so it may differ more.
    Raises TrialFailed, also if the backend raises something.
    """
    for kind in layer_kinds(loaded):
        try_layer(
            backend,
            kind,
            block_size,
            loaded.dtype,
            loaded.device,
            loaded.kv_dtype,
            rounds_queries=rounds_queries,
        )


@torch.inference_mode()
def try_layer(
    backend: AttentionBackend,
    kind: LayerKind,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
    *,
    rounds_queries: bool = False,
) -> None:
    """Compares outputs with the reference's, as `try_backend` does, for layers of one kind.

    `dtype`: of queries. `kv_dtype`: dtype of the pools, None for `dtype`.
    """
    try:
        pools = _pools(kind.layer, block_size, kv_dtype or dtype, device)
        allowed = _ROUNDED_TOLERANCE if rounds_queries else _TOLERANCES[dtype]
        error_of = _error_of_rounding if rounds_queries else _error
        for error in _errors(backend, pools, kind, dtype, error_of):
            if not error <= allowed:
                raise TrialFailed(
                    f"the output differs by {error:.2g} from the reference's, allowed {allowed:g}"
                    f" in {dtype} over {pools[0].dtype}"
                )
    except TrialFailed:
        raise
    except Exception as error:
        raise TrialFailed(f"{type(error).__name__}: {one_line(error)}") from error


def _pools(
    layer: LayerShape, block_size: int, kv_dtype: torch.dtype, device: torch.device
) -> tuple[KVCache, KVCache]:
    """Returns the pools of the reference and those of the backend."""
    num_blocks = _block_tables(block_size).numel()
    scales = (_FLOAT8_SCALES,) if kv_dtype.itemsize == 1 else ()
    oracle, tried = (
        KVCache([layer], block_size, num_blocks, 0, kv_dtype, device, scales=scales)
        for _ in range(2)
    )
    return oracle, tried


def _errors(
    backend: AttentionBackend,
    pools: tuple[KVCache, KVCache],
    kind: LayerKind,
    dtype: torch.dtype,
    error_of: Callable[[Tensor, Tensor], float],
) -> Iterator[float]:
    """Yields the errors for prompts, for all kinds of rows in one batch, and for decodes."""
    layer, scales = kind.layer, pools[0].scales[0]
    generator = torch.Generator().manual_seed(0)
    computed, new = torch.tensor(_NUM_COMPUTED), torch.tensor(_NUM_NEW)
    block_size, device = pools[0].block_size, pools[0].device
    tables = _block_tables(block_size)
    # Backends may store keys and values in their own layout, so each writes what it reads.
    none, ones = torch.zeros_like(computed), torch.ones_like(computed)
    for before, count in ((none, computed), (computed, new), (computed + new, ones)):
        batch = build_paged_batch(tables, before, count, block_size, device)
        num_tokens = len(batch.slot_mapping)
        query, key, value = (
            torch.randn(num_tokens, heads, size, generator=generator).to(device, dtype)
            for heads, size in (
                (kind.num_heads, layer.key_dim),
                (layer.num_kv_heads, layer.key_dim),
                (layer.num_kv_heads, layer.value_dim),
            )
        )
        outputs = []
        for tried, pool in zip((reference, backend), pools, strict=True):
            key_pool, value_pool = pool.key_pools[0], pool.value_pools[0]
            tried.write_kv(key, value, key_pool, value_pool, batch, scales)
            output = tried.paged_attention(query, key_pool, value_pool, batch, kind.options, scales)
            outputs.append(output)
        yield error_of(outputs[0].float(), outputs[1].float())
        if device.type == "cuda" and batch.max_num_new_tokens > 1:
            added = query.new_zeros(_NUM_ADDED_TOKENS, *query.shape[1:])
            filled = torch.cat([query, added])
            key_pool, value_pool = pools[1].key_pools[0], pools[1].value_pools[0]
            output = backend.paged_attention(
                filled, key_pool, value_pool, batch, kind.options, scales
            )
            yield error_of(outputs[0].float(), output[:num_tokens].float())


def _error(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).abs().max())


def _error_of_rounding(expected: Tensor, actual: Tensor) -> float:
    """Returns the root mean square error; the largest one if that cannot be rounding."""
    largest = _error(expected, actual)
    if not largest <= _ROUNDED_OUTLIER:
        return largest
    return float((expected - actual).square().mean().sqrt())


def _block_tables(block_size: int) -> Tensor:
    """Returns shuffled blocks for the rows, [R, M]."""
    # One more token for the final decode.
    ends = [computed + new + 1 for computed, new in zip(_NUM_COMPUTED, _NUM_NEW, strict=True)]
    width = -(-max(ends) // block_size)
    blocks = torch.randperm(len(ends) * width, generator=torch.Generator().manual_seed(2))
    return blocks.view(len(ends), width)


@torch.inference_mode()
def time_attention(backend: AttentionBackend, loaded: LoadedModel, block_size: int) -> float:
    """Returns the seconds that attention of one layer takes for typical rows.

    These are up to 64 decodes, and a chunk of 1024 tokens, each after 2048 computed tokens. If a
    model has several kinds of layers, the first is timed.
    """
    kind = layer_kinds(loaded)[0]
    row_bytes = block_bytes([kind.layer], _NUM_TIMED_COMPUTED, loaded.kv_dtype)
    num_decodes = max(1, min(_MAX_NUM_DECODES, _MAX_POOL_BYTES // row_bytes))
    time_s = _time_rows(backend, kind, loaded, block_size, (num_decodes, 1))
    time_s += _time_rows(backend, kind, loaded, block_size, (1, _NUM_TIMED_PROMPT_TOKENS))
    # Memory that torch keeps cached would be missing when the KV blocks are counted.
    torch.cuda.empty_cache()
    return time_s


def _time_rows(
    backend: AttentionBackend,
    kind: LayerKind,
    loaded: LoadedModel,
    block_size: int,
    rows: tuple[int, int],
) -> float:
    """Returns the seconds of one attention call. `rows`: number of rows, new tokens of each."""
    num_rows, num_new = rows
    layer, device = kind.layer, loaded.device
    width = -(-(_NUM_TIMED_COMPUTED + num_new) // block_size)
    cache = KVCache([layer], block_size, num_rows * width, 0, loaded.kv_dtype, device)
    batch = build_paged_batch(
        torch.arange(num_rows * width).view(num_rows, width),
        torch.full((num_rows,), _NUM_TIMED_COMPUTED),
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
    `is_asked_for`: the operator configured it, so a refusal is logged as a warning.
    """

    name: str
    make: Callable[[], AttentionBackend]
    why_absent: Callable[[], str | None]
    why_not_layer: WhyNotLayer = lambda _demand: None
    rounds_queries: bool = False
    is_asked_for: bool = False

    def why_not(self, loaded: LoadedModel, block_size: int, *, is_named: bool = True) -> str | None:
        """Returns why the candidate cannot serve the model here; None if it can.

        `is_named`: it was asked for by name, and no other backend may serve.
        """
        if self.rounds(loaded) and not is_named:
            return (
                f"over {loaded.kv_dtype_name} keys and values {self.name} rounds queries, too:"
                " taken by name only"
            )
        reason = self.why_absent()
        for layer, options in zip(loaded.layers, loaded.layer_options, strict=True):
            demand = LayerDemand(layer, options, loaded.dtype, loaded.kv_dtype, block_size)
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
    return (_flash_attention_3(flash_attention_3), triton)


def _make_triton() -> AttentionBackend:
    # The import needs Triton.
    from splitserve_kernels.gpu.attention import backend

    return backend


def _why_not_triton(demand: LayerDemand) -> str | None:
    if demand.kv_dtype.itemsize != 1 or not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability() < (8, 9):
        return "float8 keys and values: Triton converts them on compute capability 8.9 and later"
    return None


def _flash_attention_3(source: str) -> Candidate:
    @functools.cache
    def load() -> FlashAttention3Op:
        return load_flash_attention_3(source)

    def why_absent() -> str | None:
        # On other devices nothing is loaded or downloaded.
        reason = why_no_hopper() or why_unavailable()
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
    )
