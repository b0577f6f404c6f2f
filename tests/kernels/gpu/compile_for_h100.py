"""Compiles the kernels to machine code of an H100, as their launchers call them; needs no GPU.

Run as a program, without TRITON_INTERPRET. Prints a line per kernel: its name and the shared memory
that it takes, in bytes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from splitserve_kernels.gpu.attention.paged_decode import paged_decode
from splitserve_kernels.gpu.attention.paged_prefill import paged_prefill
from splitserve_kernels.gpu.block_copy import copy_blocks
from splitserve_kernels.gpu.gated_product import gated_product
from splitserve_kernels.gpu.kv_write import kv_write
from splitserve_kernels.gpu.layer_pools import KVScales, LayerPools
from splitserve_kernels.gpu.rms_norm import add_rms_norm, rms_norm
from splitserve_kernels.gpu.rotary_kv_write import RotaryTables, rotary_kv_write
from splitserve_kernels.gpu.sampling.columns import DrawColumns
from splitserve_kernels.gpu.sampling.draw import draw, greedy
from splitserve_kernels.paged_batch import AttentionOptions, build_paged_batch

FLOAT8, BFLOAT16 = torch.float8_e4m3fn, torch.bfloat16
PLAIN = AttentionOptions(scale=1.0)
# H, G, D, dtype of the query, dtype of the pools.
Layer = tuple[int, int, int, torch.dtype, torch.dtype]
LLAMA: Layer = (32, 8, 128, BFLOAT16, BFLOAT16)
LAYERS: tuple[Layer, ...] = (
    LLAMA,
    (32, 8, 128, BFLOAT16, FLOAT8),
    (8, 8, 80, torch.float16, torch.float16),
    (16, 2, 256, BFLOAT16, BFLOAT16),
    (8, 2, 128, torch.float32, torch.float32),
)


class _H100:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_instead_of_launch() -> None:
    """From now on, in this process."""
    triton.runtime.driver.set_active(_H100())
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        metadata = run(self, *arguments, **(options | {"warmup": True})).metadata
        sys.stdout.write(f"{metadata.name} {metadata.shared}\n")

    JITFunction.run = compile_only


def _compile_attention(layer: Layer, options: AttentionOptions, num_new: int) -> None:
    """Decode and, with more than one new token, prefill."""
    num_heads, num_kv_heads, head_dim, dtype, pool_dtype = layer
    query = torch.zeros(2 * num_new, num_heads, head_dim, dtype=dtype)
    pool = torch.zeros(4, 16, num_kv_heads, head_dim).to(pool_dtype)
    new = torch.full((2,), num_new)
    batch = build_paged_batch(torch.zeros(2, 99, dtype=torch.int32), new, new, 16)
    if num_new > 1:
        paged_prefill(query, LayerPools(pool, pool), batch, options)
    else:
        for num_splits in (1, 8) if layer == LLAMA else (8,):
            paged_decode(query, LayerPools(pool, pool), batch, options, num_splits)


def _compile_writes(layer: Layer) -> None:
    num_heads, num_kv_heads, head_dim, dtype, pool_dtype = layer
    pool = torch.zeros(4, 16, num_kv_heads, head_dim).to(pool_dtype)
    pools = LayerPools(pool, pool, KVScales(0.5, 0.5))
    query = torch.zeros(3, num_heads, head_dim, dtype=dtype)
    key, slots, table = query[:, :num_kv_heads], torch.arange(3), torch.zeros(3, head_dim // 4)
    kv_write(key, key, pools, slots)
    rotary_kv_write((query, key, key), RotaryTables(table, table), pools, slots)


def _compile_elementwise() -> None:
    """Widths of an 8B Llama, and of Qwen3's heads: 32 of queries and 8 of keys."""
    hidden, weight = torch.zeros(3, 4096, dtype=BFLOAT16), torch.zeros(4096, dtype=BFLOAT16)
    rms_norm(hidden, weight, 1e-5)
    add_rms_norm(hidden, hidden, weight, 1e-5)
    heads = torch.zeros(3, 48, 128, dtype=BFLOAT16)
    rms_norm(heads[:, :40], torch.zeros(40, 128, dtype=BFLOAT16), 1e-5)
    gated_product(torch.zeros(3, 28672, dtype=BFLOAT16))


def main() -> None:
    compile_instead_of_launch()
    everything = AttentionOptions(1.0, sliding_window=99, softcap=30.0, sinks=torch.zeros(32))
    for num_new in (1, 3, 600):
        _compile_attention(LLAMA, everything, num_new)
    for layer in LAYERS:
        for num_new in (1, 600):
            _compile_attention(layer, PLAIN, num_new)
        _compile_writes(layer)
    pool, ids = torch.zeros(8, 5000, dtype=BFLOAT16), torch.arange(3)
    copy_blocks(pool.view(torch.int64), ids, ids)
    _compile_elementwise()
    logits = torch.zeros(3, 32000)
    greedy(logits)
    draw(logits, DrawColumns.of_words(torch.zeros(20, dtype=torch.int64)))


if __name__ == "__main__":
    main()
