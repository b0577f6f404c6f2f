"""Largest logit of each block of the vocabulary, and the first token with that logit.

Shape letters: S rows that sample, V tokens of the vocabulary, L blocks of the vocabulary.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def survey_kernel(
    logits: tl.tensor,
    largest: tl.tensor,
    token_ids: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK_V: tl.constexpr,
) -> None:
    """Surveys one block of a row. `largest`, `token_ids`: [S, L]; a block with NaN has +inf."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token = tokens < vocab_size
    x = tl.load(logits + row * row_stride + tokens, mask=is_token, other=float("-inf"))
    # NaN and +inf both make a row invalid.
    x = tl.where(x == x, x, float("inf"))
    most = tl.max(x, 0)
    tl.store(largest + row * num_blocks + block, most)
    tl.store(
        token_ids + row * num_blocks + block, tl.min(tl.where(x == most, tokens, vocab_size), 0)
    )
