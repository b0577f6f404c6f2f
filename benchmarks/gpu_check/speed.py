"""What the device can do, and how much of it attention gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu_check.backends import present_backends
from benchmarks.gpu_check.problems import AttentionShape, make_problem
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import median_s, recorded
from executor_service.backends.attention_candidates import DEFAULT_BLOCK_SIZE, LayerDemand
from executor_service.device.kv_cache import LayerShape
from splitserve_kernels.paged_batch import AttentionBackend, AttentionOptions

# A decode reads its keys and values once: this share of what a copy reaches is wanted, where it
# reads enough for a launch not to count.
_WANTED_SHARE = 0.8
_ENOUGH_BYTES = 10**8
_MAX_NUM_LAYERS = 128


def copy_bandwidth(sizes: Sizes) -> float:
    """Bytes per second that a copy on the device reads and writes."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    seconds = median_s(lambda: target.copy_(source), sizes.device, sizes.num_runs)
    return 2 * sizes.copy_bytes / seconds


def matrix_flops(sizes: Sizes) -> float:
    """Operations per second of a large matrix product."""
    size = sizes.matrix_size
    a, b = torch.randn(2, size, size, dtype=sizes.dtype, device=sizes.device)
    return 2 * size**3 / median_s(lambda: a @ b, sizes.device, sizes.num_runs)


def measure_attention(sizes: Sizes) -> Iterator[Measurement]:
    """Copy, matrix product, then decode and prefill attention of each backend."""
    bandwidth, flops = copy_bandwidth(sizes), matrix_flops(sizes)
    yield Measurement("device", "copy bandwidth", bandwidth / 1e9, "GB/s")
    yield Measurement("device", f"matrix product of {sizes.matrix_size}", flops / 1e12, "TFLOP/s")
    _, num_kv_heads, head_dim = sizes.heads
    layer, plain = (
        LayerShape(num_kv_heads, head_dim, head_dim),
        AttentionOptions(scale=head_dim**-0.5),
    )
    for candidate in present_backends():
        name, backend, block_size = candidate.name, candidate.make(), DEFAULT_BLOCK_SIZE
        demand = LayerDemand(layer, plain, sizes.dtype, sizes.dtype, block_size)
        if candidate.why_not_layer(demand):
            continue
        for batch in sizes.batches:
            for context in sizes.contexts:
                rate, num_bytes = _decode_rate(backend, block_size, batch, context, sizes)
                share = rate / bandwidth
                counts = num_bytes >= _ENOUGH_BYTES
                yield Measurement(
                    "decode",
                    f"{name}, {batch} rows of {context}",
                    share,
                    "of copy",
                    f"at least {_WANTED_SHARE}" if counts else "",
                    share >= _WANTED_SHARE if counts else None,
                    f"{rate / 1e9:.0f} GB/s",
                )
        for computed, new in sizes.prompts:
            rate = _prefill_rate(backend, block_size, computed, new, sizes)
            label = f"{name}, {new} tokens behind {computed}"
            note = f"{rate / flops:.0%} of the matrix product"
            yield Measurement("prefill", label, rate / 1e12, "TFLOP/s", note=note)


def _decode_rate(
    backend: AttentionBackend, block_size: int, batch: int, context: int, sizes: Sizes
) -> tuple[float, int]:
    """Bytes of keys and values read per second, and bytes that one call reads.

    Several layers in turn, so that the next call does not find in a cache what it reads.
    """
    num_heads, num_kv_heads, head_dim = sizes.heads
    num_bytes = 2 * batch * context * num_kv_heads * head_dim * sizes.dtype.itemsize
    num_layers = max(1, min(_MAX_NUM_LAYERS, sizes.pool_bytes // num_bytes))
    rows = ((context - 1, 1),) * batch
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, head_dim, block_size, rows)
    attend = _attend(backend, shape, num_layers, sizes)
    # `attend` holds the memory that a recording works on.
    replay = recorded(attend, sizes.device)
    return num_layers * num_bytes / median_s(replay, sizes.device, sizes.num_runs), num_bytes


def _prefill_rate(
    backend: AttentionBackend, block_size: int, computed: int, new: int, sizes: Sizes
) -> float:
    """Operations per second: two products, of which the causal mask leaves a part."""
    num_heads, num_kv_heads, head_dim = sizes.heads
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, block_size, ((computed, new),)
    )
    num_pairs = new * computed + new * (new + 1) // 2
    attend = _attend(backend, shape, 1, sizes)
    return 4 * num_heads * head_dim * num_pairs / median_s(attend, sizes.device, sizes.num_runs)


def _attend(
    backend: AttentionBackend, shape: AttentionShape, num_layers: int, sizes: Sizes
) -> Callable[[], None]:
    problem = make_problem(shape, num_layers, sizes.dtype, sizes.device)
    options = AttentionOptions(scale=shape.key_dim**-0.5)
    pools = list(zip(problem.cache.key_pools, problem.cache.value_pools, strict=True))

    def run() -> None:
        for key_pool, value_pool in pools:
            backend.paged_attention(problem.query, key_pool, value_pool, problem.batch, options)

    return run
