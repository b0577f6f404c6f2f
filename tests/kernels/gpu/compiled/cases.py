"""Every kernel of the GPU, as its launcher calls it: the one list that all kernels are in.

A case launches on tensors of a CPU, whose shapes and dtypes are those of a model; `compiler` has
the launch compile instead. A kernel without a case fails `test_compilation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from splitserve_kernels.adapter_tiles import NUM_WORDS, SlotLinear, TokenTiles
from splitserve_kernels.gpu.attention.backend import paged_attention
from splitserve_kernels.gpu.attention.operator_support import rows_in_sight, weigh_with_sinks
from splitserve_kernels.gpu.attention.paged_decode import paged_split_prefill
from splitserve_kernels.gpu.kv_write import copy_blocks, kv_write, rotary_kv_write
from splitserve_kernels.gpu.launch import LayerPools, RotaryTables
from splitserve_kernels.gpu.layer_ops import add_rms_norm, gated_product, rms_norm
from splitserve_kernels.gpu.low_rank import add_low_rank
from splitserve_kernels.gpu.quantized.gpu_weight import GpuPackedWeight
from splitserve_kernels.gpu.quantized.linear import MAX_NUM_FEW_ROWS, linear_tiles, quantized_linear
from splitserve_kernels.gpu.quantized.scaled_mm import quantize_rows
from splitserve_kernels.gpu.sampling.adjust import AdjustColumns, adjust
from splitserve_kernels.gpu.sampling.draw import DrawColumns, draw, greedy
from splitserve_kernels.packed_weight import CodePlane, GroupValues, PackedWeight
from splitserve_kernels.paged_batch import AttentionOptions, KVScales, PagedBatch, build_paged_batch
from tests.kernels.gpu.compiled.resources import Bounds

# Ampere of data centres, other Ampere, Ada, Hopper, Blackwell of data centres, other Blackwell.
CAPABILITIES = (80, 86, 89, 90, 100, 120)
# Float8 is not converted before.
_SINCE_ADA = (89, 90, 100, 120)
# Kernels without a case for earlier generations.
KERNELS_SINCE_ADA = frozenset({"_quantize_kernel"})
_FLOAT8, _BFLOAT16, _FLOAT32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
_PLAIN = AttentionOptions(scale=1.0)


@dataclass(frozen=True, slots=True)
class Case:
    """`launch`: all its launches are compiled. `bounds`: by the name of a kernel, see `Bounds`."""

    launch: Callable[[], None]
    capabilities: tuple[int, ...] = CAPABILITIES
    bounds: Mapping[str, Bounds] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layer:
    """Heads of queries, of keys and values; their sizes; the dtypes of queries and of pools."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = _BFLOAT16
    pool_dtype: torch.dtype | None = None

    def pools(self) -> LayerPools:
        dtype = self.pool_dtype or self.dtype
        key, value = (
            torch.zeros(4, 16, self.num_kv_heads, size).to(dtype)
            for size in (self.key_dim, self.value_dim)
        )
        return LayerPools(key, value, KVScales(0.5, 0.5))

    def query(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, self.num_heads, self.key_dim, dtype=self.dtype)


LLAMA = Layer(32, 8, 128, 128)
LLAMA_FLOAT8 = Layer(32, 8, 128, 128, pool_dtype=_FLOAT8)
LLAMA_FLOAT32 = Layer(32, 8, 128, 128, _FLOAT32)
GEMMA = Layer(16, 8, 256, 256)
UNEVEN = Layer(32, 8, 192, 128)
WIDEST = Layer(16, 2, 512, 512)
LATENT = Layer(128, 1, 576, 512)
# The keys and the values of the next tile, at least.
_PIPELINED = {
    "_decode_kernel": Bounds(registers=200, shared_bytes=80 * 1024, loads_ahead=2),
    "_prefill_kernel": Bounds(registers=254, shared_bytes=146 * 1024, loads_ahead=2),
}
_AHEAD = {name: Bounds(loads_ahead=2) for name in _PIPELINED}
# Outside of the loop over keys a little is spilled before Hopper.
_SPLIT = {
    "_decode_kernel": Bounds(
        registers=255, spilled_bytes=64, shared_bytes=136 * 1024, loads_ahead=2
    )
}
_ADAPTING = {"_shrink_kernel": Bounds(registers=168, shared_bytes=80 * 1024, loads_ahead=2)}
EVERYTHING = AttentionOptions(1.0, sliding_window=99, softcap=30.0, sinks=torch.zeros(32))
_SPILLING = {"_decode_kernel": Bounds(spilled_bytes=32)}
# What models have of these together.
_WINDOW_AND_CAP = AttentionOptions(1.0, sliding_window=99, softcap=30.0)
_WINDOW_AND_SINKS = AttentionOptions(1.0, sliding_window=99, sinks=torch.zeros(32))
# New tokens of a step that has few.
NUM_FEW = 20
# By the name of its case, of layers whose decodes are held to their occupancy.
ATTENTION_LAYERS: dict[str, Layer] = {
    "attention": LLAMA,
    "attention with a window and a cap": LLAMA,
    "attention with a window and sinks": LLAMA,
    "attention over float8": LLAMA_FLOAT8,
    "attention in float32": LLAMA_FLOAT32,
    "attention of heads of 256": GEMMA,
    "attention of heads of 512": WIDEST,
    "attention of latent heads": LATENT,
}
# The same of few tokens.
FEW_TOKENS_LAYERS: dict[str, Layer] = {
    "few tokens": LLAMA,
    "few tokens with everything": LLAMA,
    "few tokens over float8": LLAMA_FLOAT8,
    "few tokens in float32": LLAMA_FLOAT32,
    "few tokens of heads of 256": GEMMA,
    "few tokens of heads of 512": WIDEST,
    "few tokens of latent heads": LATENT,
}


def _batch(num_decodes: int, num_prompt_tokens: int) -> PagedBatch:
    new = torch.tensor([1] * num_decodes + [num_prompt_tokens])
    tables = torch.zeros(len(new), 99, dtype=torch.int32)
    return build_paged_batch(tables, torch.full_like(new, 7), new, 16)


def _attention(layer: Layer, options: AttentionOptions = _PLAIN) -> Callable[[], None]:
    """A step of decodes and a prompt: both kernels, and what merges."""

    def launch() -> None:
        pools = layer.pools()
        batch = _batch(num_decodes=3, num_prompt_tokens=600)
        paged_attention(layer.query(603), pools.key, pools.value, batch, options, pools.scales)

    return launch


def _few_tokens(layer: Layer, options: AttentionOptions = _PLAIN) -> Callable[[], None]:
    """A turn of a chat, whose keys programs share."""

    def launch() -> None:
        query, pools, batch = layer.query(NUM_FEW), layer.pools(), _batch(0, NUM_FEW)
        output = query.new_empty(NUM_FEW, layer.num_heads, layer.value_dim)
        paged_split_prefill(query, pools, batch, options, output)

    return launch


def _writes(layer: Layer) -> Callable[[], None]:
    def launch() -> None:
        query, pools = layer.query(3), layer.pools()
        key, slots = query[:, : layer.num_kv_heads], torch.arange(3)
        table = torch.zeros(3, layer.key_dim // 4)
        kv_write(key, key, pools, slots)
        rotary_kv_write((query, key, key), RotaryTables(table, table), pools, slots)

    return launch


def _copies() -> None:
    pool, ids = torch.zeros(8, 5000, dtype=torch.int64), torch.arange(3)
    copy_blocks(pool, ids, ids)


def _elementwise() -> None:
    """Widths of an 8B Llama, and of Qwen3's heads: 32 of queries and 8 of keys."""
    hidden, weight = torch.zeros(3, 4096, dtype=_BFLOAT16), torch.zeros(4096, dtype=_BFLOAT16)
    rms_norm(hidden, weight, 1e-5)
    add_rms_norm(hidden, hidden, weight, 1e-5)
    heads = torch.zeros(3, 48, 128, dtype=_BFLOAT16)
    rms_norm(heads[:, :40], torch.zeros(40, 128, dtype=_BFLOAT16), 1e-5)
    gated_product(torch.zeros(3, 28672, dtype=_BFLOAT16))


def _samples() -> None:
    logits = torch.zeros(3, 32000)
    greedy(logits)
    draw(logits, DrawColumns.of_words(torch.zeros(20, dtype=torch.int64)))


def _adjusts() -> None:
    lines, words = torch.zeros(3, dtype=torch.int32), torch.zeros(1, 1000, dtype=torch.int32)
    columns = AdjustColumns(
        mask_lines=lines,
        mask_words=words,
        bias_starts=torch.zeros(4, dtype=torch.int32),
        biased_tokens=lines,
        biases=torch.zeros(3),
        count_lines=lines,
        counts=torch.zeros(2, 32000, dtype=torch.int32),
        penalties=torch.zeros(3, 3),
        output_bits=2**30 - 1,
    )
    adjust(torch.zeros(3, 32000), columns)


def _adapts(
    num_inputs: int, sizes: tuple[int, ...], max_rank: int, dtype: torch.dtype = _BFLOAT16
) -> Callable[[], None]:
    """Without and with a bias of the layer."""

    def launch() -> None:
        words = torch.zeros(8, len(sizes), NUM_WORDS, dtype=torch.int64)
        tiles = TokenTiles(torch.zeros(99, dtype=torch.int32), torch.zeros(3, 9, dtype=torch.int32))
        x, output = (torch.zeros(99, size, dtype=dtype) for size in (num_inputs, sum(sizes)))
        for bias in (None, torch.zeros(sum(sizes), dtype=dtype)):
            add_low_rank(x, output, tiles, SlotLinear(words, sizes, max_rank), bias)

    return launch


@dataclass(frozen=True, slots=True)
class Codes:
    """Quantised weights of an 8B Llama's first matrix; `group_size` 0: a scale of each output."""

    num_bits: int
    group_size: int
    values: torch.Tensor | None = None
    has_zero_points: bool = False
    has_offsets: bool = False

    def weight(self) -> PackedWeight:
        num_inputs = 4096
        groups = torch.ones(6144, num_inputs // (self.group_size or num_inputs))
        return PackedWeight(
            planes=(CodePlane(torch.zeros(6144, 512 * self.num_bits).byte(), self.num_bits),),
            values=self.values,
            scales=GroupValues(groups / 3 if self.has_offsets else groups),
            group_size=self.group_size or num_inputs,
            dtype=_BFLOAT16,
            zero_points=groups.byte() if self.has_zero_points else None,
            offsets=GroupValues(groups) if self.has_offsets else None,
        )


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6.0])
_FLOAT8_NUMBERS = torch.arange(256, dtype=torch.uint8).view(_FLOAT8).float()


def _quantized(codes: Codes, *num_rows: int, dtype: torch.dtype = _BFLOAT16) -> Callable[[], None]:
    def launch() -> None:
        packed = GpuPackedWeight.pack(codes.weight(), torch.device("cpu"))
        for number in num_rows:
            rows = torch.zeros(number, 4096, dtype=dtype)
            tiles = None
            if number <= MAX_NUM_FEW_ROWS:
                # As on a GPU, which runs many programs at a time.
                tiles = linear_tiles(packed, number, dtype, rows.device)
                tiles = replace(tiles, num_shares=4, chunks_of_share=4)
            quantized_linear(rows, packed, tiles=tiles)

    return launch


def _rounds_rows() -> None:
    quantize_rows(torch.zeros(3, 4096, dtype=_BFLOAT16))


def _rows() -> None:
    rows_in_sight(_batch(3, 600), 16, window=99)


def _sinks() -> None:
    weigh_with_sinks(
        torch.zeros(3, 64, 64, dtype=_BFLOAT16),
        torch.zeros(64, 3),
        torch.zeros(64, dtype=_BFLOAT16),
        _batch(3, 1).query_starts,
    )


# Rows of a decode, the most that are few, and a prompt.
_EVERY_NUMBER = (3, MAX_NUM_FEW_ROWS, 600)


CASES: dict[str, Case] = {
    "attention": Case(_attention(LLAMA), bounds=_PIPELINED),
    "attention with everything": Case(_attention(LLAMA, EVERYTHING), bounds=_PIPELINED),
    "attention with a window and a cap": Case(_attention(LLAMA, _WINDOW_AND_CAP)),
    "attention with a window and sinks": Case(_attention(LLAMA, _WINDOW_AND_SINKS)),
    "attention over float8": Case(_attention(LLAMA_FLOAT8), capabilities=_SINCE_ADA),
    "attention in float32": Case(_attention(LLAMA_FLOAT32)),
    "attention of heads of 256": Case(_attention(GEMMA), bounds=_AHEAD),
    "attention of heads of 192 and 128": Case(_attention(UNEVEN), bounds=_AHEAD),
    "attention of heads of 512": Case(_attention(WIDEST)),
    "attention of latent heads": Case(_attention(LATENT)),
    "few tokens": Case(_few_tokens(LLAMA), bounds=_SPLIT),
    "few tokens with everything": Case(_few_tokens(LLAMA, EVERYTHING), bounds=_SPLIT),
    "few tokens over float8": Case(
        _few_tokens(LLAMA_FLOAT8), bounds=_SPILLING, capabilities=_SINCE_ADA
    ),
    "few tokens in float32": Case(_few_tokens(LLAMA_FLOAT32), bounds=_SPILLING),
    "few tokens of heads of 256": Case(_few_tokens(GEMMA)),
    "few tokens of heads of 512": Case(_few_tokens(WIDEST)),
    "few tokens of latent heads": Case(_few_tokens(LATENT)),
    "4 bits with zero points": Case(
        _quantized(Codes(4, 128, has_zero_points=True), *_EVERY_NUMBER)
    ),
    "4 bits with offsets": Case(_quantized(Codes(4, 32, has_offsets=True), *_EVERY_NUMBER)),
    "4 bits in float32": Case(_quantized(Codes(4, 128), 3, 600, dtype=_FLOAT32)),
    "4 bits of a table": Case(
        _quantized(Codes(4, 64, torch.linspace(0, 1, 16).sin()), 3, 600),
        bounds={"_linear_kernel": Bounds(spilled_bytes=32)},
    ),
    "MXFP4": Case(_quantized(Codes(4, 32, _E2M1), 3, 600)),
    "NVFP4": Case(_quantized(Codes(4, 16, _E2M1), 3, 600)),
    "8 bits": Case(_quantized(Codes(8, 0, torch.arange(256) - 128.0), 3, 600)),
    "float8 in blocks": Case(_quantized(Codes(8, 128, _FLOAT8_NUMBERS), 3, 600)),
    "adapters": Case(_adapts(4096, (4096, 1024, 1024), 64), bounds=_ADAPTING),
    "adapters of few ranks": Case(_adapts(14336, (4096,), 16), bounds=_ADAPTING),
    "adapters of many ranks": Case(_adapts(4096, (14336, 14336), 256), bounds=_ADAPTING),
    "adapters in float32": Case(_adapts(4096, (4096, 1024, 1024), 64, _FLOAT32)),
    "rounds rows": Case(_rounds_rows, capabilities=_SINCE_ADA),
    "rows in sight": Case(_rows),
    "sinks": Case(_sinks),
    "writes": Case(_writes(LLAMA)),
    "writes in float8": Case(_writes(LLAMA_FLOAT8), capabilities=_SINCE_ADA),
    "copies": Case(_copies),
    "elementwise": Case(_elementwise),
    "samples": Case(_samples),
    "adjusts": Case(_adjusts, bounds={"adjust_kernel": Bounds(registers=64, shared_bytes=1024)}),
}
