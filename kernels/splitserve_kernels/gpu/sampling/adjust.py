"""Adjustment of logits before sampling: masks, biases and penalties, in one launch.

The definitions are steps 1 and 2 of `SamplingParams` in `executor.proto`. Each number is computed
by the same operations, in the same order, as in plain torch, so that it is bit-identical. Every row
has its own parameters; rows without parameters are copied.

Shape letters: S rows that sample, V tokens of the vocabulary, G masks, W words of a mask, 32 W >=
V, E biases over all rows, N lines of counts.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.launch import ceil_div

_BLOCK_V = 1024


@dataclass(frozen=True, slots=True)
class AdjustColumns:
    """Adjustments that rows request, on the device of the logits.

    `mask_lines`: [S] int32, mask of each row, -1 for none. `mask_words`: [G, W] int32; bit t % 32,
    from the lowest, of word t // 32 tells whether token t is allowed. `bias_starts`: [S + 1] int32,
    start of the biases of a row in `biased_tokens` [E] int32, ascending in each row, and `biases`
    [E] float32, where -inf forbids a token. `count_lines`: [S] int32, line of each row in `counts`
    [N, V] int32, -1 for no penalties; a count is the number of occurrences in the output, and more
    than `output_bits` if the token occurs in the prompt. `penalties`: [S, 3] float32, repetition,
    frequency, presence.
    """

    mask_lines: Tensor
    mask_words: Tensor
    bias_starts: Tensor
    biased_tokens: Tensor
    biases: Tensor
    count_lines: Tensor
    counts: Tensor
    penalties: Tensor
    output_bits: int


def adjust(logits: Tensor, columns: AdjustColumns) -> Tensor:
    """Returns an adjusted copy of `logits` [S, V] float32, last stride 1, V < 2^31."""
    num_rows, vocab_size = logits.shape
    adjusted = torch.empty(num_rows, vocab_size, dtype=logits.dtype, device=logits.device)
    if num_rows:
        adjust_kernel[(num_rows, ceil_div(vocab_size, _BLOCK_V))](
            logits,
            adjusted,
            columns.mask_lines,
            columns.mask_words,
            columns.bias_starts,
            columns.biased_tokens,
            columns.biases,
            columns.count_lines,
            columns.counts,
            columns.penalties,
            vocab_size,
            logits.stride(0),
            columns.mask_words.shape[1],
            OUTPUT_BITS=columns.output_bits,
            BLOCK_V=_BLOCK_V,
            # A product and a difference are rounded separately.
            enable_fp_fusion=False,
        )
    return adjusted


@triton.jit
def _num_below(numbers: tl.tensor, count: tl.tensor, bound: tl.tensor) -> tl.tensor:
    """Returns how many of the first `count` >= 1 ascending `numbers` are below each of `bound`."""
    below = bound * 0
    while count > 1:
        half = count // 2
        below = tl.where(tl.load(numbers + below + half - 1) < bound, below + half, below)
        count -= half
    return below + (tl.load(numbers + below) < bound).to(tl.int32)


@triton.jit(do_not_specialize=["num_words"])
def adjust_kernel(
    logits: tl.tensor,
    adjusted: tl.tensor,
    mask_lines: tl.tensor,
    mask_words: tl.tensor,
    bias_starts: tl.tensor,
    biased_tokens: tl.tensor,
    biases: tl.tensor,
    count_lines: tl.tensor,
    counts: tl.tensor,
    penalties: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    num_words: tl.tensor,
    OUTPUT_BITS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Adjusts one block of a row."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_V
    tokens = first + tl.arange(0, BLOCK_V)
    is_token = tokens < vocab_size
    x = tl.load(logits + row * row_stride + tokens, mask=is_token, other=0.0)

    mask_line = tl.load(mask_lines + row).to(tl.int64)
    if mask_line >= 0:
        words = tl.load(mask_words + mask_line * num_words + tokens // 32, mask=is_token, other=0)
        x = tl.where(((words >> (tokens % 32)) & 1) != 0, x, float("-inf"))

    start = tl.load(bias_starts + row)
    count = tl.load(bias_starts + row + 1) - start
    if count > 0:
        # Biases of this block, usually a few.
        before = _num_below(biased_tokens + start, count, first)
        end = _num_below(biased_tokens + start, count, first + BLOCK_V)
        start += before
        count = end - before
        if count > 0:
            place = tl.minimum(_num_below(biased_tokens + start, count, tokens), count - 1)
            bias = tl.load(biases + start + place)
            biased = tl.where(bias == float("-inf"), bias, x + bias)
            x = tl.where(tl.load(biased_tokens + start + place) == tokens, biased, x)

    count_line = tl.load(count_lines + row).to(tl.int64)
    if count_line >= 0:
        repetition = tl.load(penalties + row * 3)
        frequency = tl.load(penalties + row * 3 + 1)
        presence = tl.load(penalties + row * 3 + 2)
        seen = tl.load(counts + count_line * vocab_size + tokens, mask=is_token, other=0)
        repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(seen > 0, repeated, x)
        in_output = seen & OUTPUT_BITS
        x = x - frequency * in_output.to(tl.float32)
        x = x - presence * (in_output > 0).to(tl.float32)
    tl.store(adjusted + row * vocab_size + tokens, x, mask=is_token)
