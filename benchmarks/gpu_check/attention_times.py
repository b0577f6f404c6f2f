"""How long attention takes over rows of given lengths, and what it cannot do without.

Shape letters: D size of a query or key head, E size of a value head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu_check.backends import why_not
from benchmarks.gpu_check.machine import rates_of
from benchmarks.gpu_check.problems import AttentionShape, make_problem
from benchmarks.gpu_check.sizes import Rows, Sizes
from benchmarks.gpu_check.timing import median_s, recorded
from executor_service.backends import Candidate
from executor_service.device import LayerShape
from splitserve_kernels.paged_batch import AttentionOptions

_MAX_NUM_LAYERS = 128


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of layer. `kv_dtype`: None for that of the queries."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    kv_dtype: torch.dtype | None = None

    @property
    def options(self) -> AttentionOptions:
        """With the usual scale."""
        return AttentionOptions(self.key_dim**-0.5, self.window, self.softcap)

    def why_not(self, candidate: Candidate, dtype: torch.dtype) -> str | None:
        """What keeps a backend from it; None if nothing does."""
        shape = LayerShape(self.num_kv_heads, self.key_dim, self.value_dim)
        return why_not(candidate, shape, self.options, dtype, self.kv_dtype or dtype)

    def num_bytes(self, rows: Rows, dtype: torch.dtype) -> int:
        """Of keys and values in sight, each read once."""
        window = self.window or 2**62
        tokens = sum(min(computed + new, window + new - 1) for computed, new in rows)
        itemsize = (self.kv_dtype or dtype).itemsize
        return tokens * self.num_kv_heads * (self.key_dim + self.value_dim) * itemsize

    def num_operations(self, rows: Rows) -> int:
        """Of the products with keys and with values; the causal mask leaves a part."""
        pairs = sum(self._num_pairs(computed, new) for computed, new in rows)
        return 2 * self.num_heads * (self.key_dim + self.value_dim) * pairs

    def _num_pairs(self, computed: int, new: int) -> int:
        if self.window is None:
            return new * computed + new * (new + 1) // 2
        return sum(min(computed + index + 1, self.window) for index in range(new))


def plain_layer(sizes: Sizes) -> Layer:
    """That of the models that aims are about."""
    num_heads, num_kv_heads, head_dim = sizes.heads
    return Layer(num_heads, num_kv_heads, head_dim, head_dim)


def floor_s(layer: Layer, rows: Rows, sizes: Sizes) -> float:
    """Seconds that no program is faster than: prompts' arithmetic and everybody's bytes."""
    prompts = tuple(row for row in rows if row[1] > 1)
    num_bytes = layer.num_bytes(rows, sizes.dtype)
    return rates_of(sizes).floor_s(num_bytes, layer.num_operations(prompts))


def attention_s(candidate: Candidate, layer: Layer, rows: Rows, sizes: Sizes) -> float:
    """Seconds of one call, of several in turn, so that no cache has what the next one reads.

    They are recorded, so that launching them takes no time.
    """
    attend, num_layers = attending(candidate, layer, rows, sizes)
    # `attend` holds the memory that the recording works on.
    replay = recorded(attend, sizes.device)
    return median_s(replay, sizes.device, sizes.num_runs) / num_layers


def launched_s(candidate: Candidate, layer: Layer, rows: Rows, sizes: Sizes) -> float:
    """The same as a step does it that is not recorded."""
    attend, num_layers = attending(candidate, layer, rows, sizes)
    return median_s(attend, sizes.device, sizes.num_runs) / num_layers


def attending(
    candidate: Candidate, layer: Layer, rows: Rows, sizes: Sizes
) -> tuple[Callable[[], None], int]:
    """What attends in a number of layers, and that number."""
    num_bytes = max(1, layer.num_bytes(rows, sizes.dtype))
    num_layers = max(1, min(_MAX_NUM_LAYERS, sizes.pool_bytes // num_bytes))
    return attending_in(candidate, layer, rows, sizes, num_layers), num_layers


def attending_in(
    candidate: Candidate, layer: Layer, rows: Rows, sizes: Sizes, num_layers: int
) -> Callable[[], None]:
    """What attends in so many layers, whose blocks lie together."""
    backend = candidate.make()
    shape = AttentionShape(
        layer.num_heads,
        layer.num_kv_heads,
        layer.key_dim,
        layer.value_dim,
        candidate.block_size,
        rows,
    )
    problem = make_problem(shape, num_layers, sizes.dtype, sizes.device, layer.kv_dtype)
    pools = list(zip(problem.cache.key_pools, problem.cache.value_pools, strict=True))
    query = problem.query

    def run() -> None:
        for key_pool, value_pool in pools:
            backend.paged_attention(query, key_pool, value_pool, problem.batch, layer.options)

    return run
