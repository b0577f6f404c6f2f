"""Matrix products and attention of prompts on a CPU, beside the machine's rate of products.

Times the native kernels alone, at the shapes of models of 0.6 and 1 billion parameters. The rate is
that of torch with a large matrix of the same dtype, in turns with the kernels, so that both see the
same machine; the best of several turns counts. Prints a JSON object for each shape, and a table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.report import emit, print_table
from splitserve_kernels.cpu import (
    NativeAttention,
    NativeLibrary,
    WeightRows,
    linear,
    load_library,
    pack,
)
from splitserve_kernels.paged_batch import AttentionOptions, PagedBatch

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
# Tokens computed before, and new ones.
_PROMPTS = ((0, 128), (0, 512), (0, 2048), (3584, 512), (15872, 512))
_BLOCK_SIZE = 16
_MATRIX_SIZE = 2048


def main() -> None:
    """Prints the share of the machine's rate that each kernel reaches."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    library, dtype = load_library(), getattr(torch, arguments.dtype)
    lines = [["kernel", "size", "GFLOP/s", "of torch's rate"]]

    def show(kernel: str, size: str, num_flops: float, run: Callable[[], object]) -> None:
        gflops, rate = _measure(run, num_flops, dtype, arguments.turns)
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def _measure(
    run: Callable[[], object], num_flops: float, dtype: torch.dtype, num_turns: int
) -> tuple[float, float]:
    """Returns GFLOP/s of `run`, which computes `num_flops`, and of torch."""
    matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, dtype=dtype)
    run_s, product_s = [], []
    run()
    for _ in range(num_turns):
        product_s.append(_seconds(lambda: torch.nn.functional.linear(matrix, matrix)))
        run_s.append(_seconds(run))
    return num_flops / min(run_s) / 1e9, 2 * _MATRIX_SIZE**3 / min(product_s) / 1e9


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
) -> Callable[[], object]:
    """Returns the attention of one row; its blocks lie in random order."""
    num_heads, num_kv_heads, head_dim = heads
    num_blocks = -(-(computed + new) // _BLOCK_SIZE)
    positions = torch.arange(computed, computed + new)
    table = torch.randperm(num_blocks).to(torch.int32)
    slots = table[positions // _BLOCK_SIZE].long() * _BLOCK_SIZE + positions % _BLOCK_SIZE
    batch = PagedBatch(
        block_tables=table[None],
        num_computed_tokens=torch.tensor([computed], dtype=torch.int32),
        query_starts=torch.tensor([0, new], dtype=torch.int32),
        slot_mapping=slots,
        max_num_new_tokens=new,
        max_num_tokens=computed + new,
    )
    keys, values = (
        torch.randn(num_blocks, _BLOCK_SIZE, num_kv_heads, head_dim).to(dtype) for _ in range(2)
    )
    query = torch.randn(new, num_heads, head_dim).to(dtype)
    options = AttentionOptions(scale=head_dim**-0.5)
    attention = NativeAttention(library)
    return partial(attention.paged_attention, query, keys, values, batch, options)


if __name__ == "__main__":
    main()
