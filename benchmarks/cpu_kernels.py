"""Native kernels on a CPU: products and attention of prompts, and attention of decodes.

Times the kernels alone, at the shapes of models of 0.16 to 1 billion parameters. Products are
beside torch's rate with a large matrix of the same dtype; decodes, which are bound by memory,
beside the rate at which the native product of one row reads a large matrix. Both take turns, so
that they see the same machine; the best of several turns counts. Prints a JSON object for each
shape, and a table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.report import emit, print_table
from executor_service.device import KVCache, LayerShape
from splitserve_kernels.cpu import (
    NativeAttention,
    NativeLibrary,
    WeightRows,
    linear,
    load_library,
    pack,
)
from splitserve_kernels.paged_batch import AttentionOptions, build_paged_batch

# Outputs and inputs.
_MATRICES = {
    "0.6b qkv": (4096, 1024),
    "0.6b attention output": (1024, 2048),
    "0.6b gate and up": (6144, 1024),
    "0.6b down": (1024, 3072),
    "1b gate and up": (16384, 2048),
    "1b down": (2048, 8192),
}
_ROWS = (16, 64, 128, 512, 2048)
# Query heads, key/value heads and their size.
_HEADS = {"0.6b attention": (16, 8, 128), "1b attention": (32, 8, 64)}
_DECODE_HEADS = {"160m attention": (12, 12, 64), **_HEADS}
# Rows, tokens of each, and how many of them all rows share.
_DECODES = ((1, 8192, 0), (8, 1024, 0), (8, 8192, 0), (32, 1024, 0), (8, 8192, 8192 - 512))
# Tokens computed before, and new ones.
_PROMPTS = ((0, 128), (0, 512), (0, 2048), (3584, 512), (15872, 512))
_BLOCK_SIZE = 16
_MATRIX_SIZE = 2048
_READ_SIZE = 6144
# More than caches hold.
_READ_BYTES = 64 << 20


def main() -> None:
    """Prints the share of the machine's rate that each kernel reaches."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    library, dtype = load_library(), getattr(torch, arguments.dtype)
    if arguments.only != "decodes":
        _measure_products(library, dtype, arguments.turns)
    if arguments.only != "products":
        _measure_decodes(library, dtype, arguments.turns)


def _measure_products(library: NativeLibrary, dtype: torch.dtype, num_turns: int) -> None:
    lines = [["kernel", "size", "GFLOP/s", "of torch's rate"]]

    def show(kernel: str, size: str, num_flops: float, run: Callable[[], object]) -> None:
        gflops, rate = _measure(run, num_flops, dtype, num_turns)
        share = gflops / rate
        figures = {"gflops": round(gflops, 1), "share": round(share, 3)}
        emit("cpu_kernels", kernel=kernel, size=size, **figures)
        lines.append([kernel, size, f"{gflops:.0f}", f"{share:.2f}"])

    for name, (num_outputs, num_inputs) in _MATRICES.items():
        weights = pack(library, WeightRows.of(torch.randn(num_outputs, num_inputs).to(dtype)))
        for num_rows in _ROWS:
            rows = torch.randn(num_rows, num_inputs).to(dtype)
            num_flops = 2.0 * num_rows * num_outputs * num_inputs
            show(name, f"{num_rows} rows", num_flops, partial(linear, library, weights, rows))
    for name, heads in _HEADS.items():
        for computed, new in _PROMPTS:
            num_flops = 4.0 * heads[0] * heads[2] * new * (computed + (new + 1) / 2)
            run = _attention(library, dtype, heads, computed, new)
            show(name, f"{new} tokens behind {computed}", num_flops, run)
    print_table(lines)


def _measure_decodes(library: NativeLibrary, dtype: torch.dtype, num_turns: int) -> None:
    lines = [["decodes", "size", "GB/s", "of the rate of reading"]]
    matrix = torch.randn(_READ_SIZE, _READ_SIZE).to(dtype)
    weights = pack(library, WeightRows.of(matrix))
    read = partial(linear, library, weights, torch.randn(1, _READ_SIZE).to(dtype))
    for name, heads in _DECODE_HEADS.items():
        for num_rows, computed, num_shared in _DECODES:
            num_read = num_rows * computed - (num_rows - 1) * num_shared
            layer_bytes = 2 * num_read * heads[1] * heads[2] * dtype.itemsize
            num_layers = -(-_READ_BYTES // layer_bytes)
            run = _attention(library, dtype, heads, computed, 1, num_rows, num_shared, num_layers)
            run_s, read_s = _seconds_in_turns(run, read, num_turns)
            rate, most = num_layers * layer_bytes / run_s / 1e9, matrix.nbytes / read_s / 1e9
            size = f"{num_rows} rows of {computed}" + f", {num_shared} shared" * bool(num_shared)
            figures = {"gb_per_s": round(rate, 1), "share": round(rate / most, 3)}
            emit("cpu_kernels", kernel=name, size=size, **figures)
            lines.append([name, size, f"{rate:.1f}", f"{rate / most:.2f}"])
    print_table(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", choices=("products", "decodes"))
    return parser.parse_args()


def _measure(
    run: Callable[[], object], num_flops: float, dtype: torch.dtype, num_turns: int
) -> tuple[float, float]:
    """Returns GFLOP/s of `run`, which computes `num_flops`, and of torch."""
    matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, dtype=dtype)
    run_s, product_s = _seconds_in_turns(
        run, lambda: torch.nn.functional.linear(matrix, matrix), num_turns
    )
    return num_flops / run_s / 1e9, 2 * _MATRIX_SIZE**3 / product_s / 1e9


def _seconds_in_turns(
    run: Callable[[], object], other: Callable[[], object], num_turns: int
) -> tuple[float, float]:
    """Returns the least duration of each."""
    run()
    other()
    turns = [(_seconds(run), _seconds(other)) for _ in range(num_turns)]
    return min(each for each, _ in turns), min(each for _, each in turns)


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def _attention(
    library: NativeLibrary,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    computed: int,
    new: int,
    num_rows: int = 1,
    num_shared: int = 0,
    num_layers: int = 1,
) -> Callable[[], object]:
    """Returns the attention of rows in layers one after the other.

    Blocks lie in random order. `num_shared`: first tokens of all rows, whose blocks are the same.
    """
    num_heads, num_kv_heads, head_dim = heads
    width = -(-(computed + new) // _BLOCK_SIZE)
    tables = torch.randperm(num_rows * width).view(num_rows, width)
    tables[:, : num_shared // _BLOCK_SIZE] = tables[:1, : num_shared // _BLOCK_SIZE]
    counts = torch.ones(num_rows, dtype=torch.int64)
    batch = build_paged_batch(tables, computed * counts, new * counts, _BLOCK_SIZE)
    layers = [LayerShape(num_kv_heads, head_dim, head_dim)] * num_layers
    cache = KVCache(layers, _BLOCK_SIZE, num_rows * width, 0, dtype, torch.device("cpu"))
    for pool in (*cache.key_pools, *cache.value_pools):
        pool.fill_(0.5)
    query = torch.randn(num_rows * new, num_heads, head_dim).to(dtype)
    options = AttentionOptions(scale=head_dim**-0.5)
    attention = NativeAttention(library)

    def run() -> None:
        for keys, values in zip(cache.key_pools, cache.value_pools, strict=True):
            attention.paged_attention(query, keys, values, batch, options)

    return run


if __name__ == "__main__":
    main()
