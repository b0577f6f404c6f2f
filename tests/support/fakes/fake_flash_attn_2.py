"""flash-attn 2, as far as we call it, in plain torch: what its source checks and reads.

As in `fake_flash_attn_3`, whole tiles are looked up from the first in sight on, and every value of
them is multiplied with its weight, 0 or not; nothing is looked up beyond the last key of a row.

Shape letters: R rows, T tokens over all rows, H query heads, G key/value heads, D size of a head, P
page size, N pages.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tests.support.fakes.fake_flash_attn_3 import attend, hidden_keys, look_up

_PAGE_SIZE = 256


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """The function of that name in version 2.8, for pages.

    `q`: [T, H, D]; `k`, `v`: [N, P, G, D]; `cu_seqlens_q`, `cu_seqlens_k`: [R + 1] int32;
    `block_table`: [R, M] int32. Tokens of no row are NaN.
    """
    assert block_table is not None
    assert dropout_p == 0
    assert alibi_slopes is None
    assert not deterministic
    _check(q, k, v, block_table)
    starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for each in (cu_seqlens_q, cu_seqlens_k):
        assert each.dtype == torch.int32
        assert each.is_contiguous()
        assert each.shape == (block_table.shape[0] + 1,)
    lengths = [end - start for start, end in pairwise(ends)]
    # A step of single tokens is computed as one of equal rows, in another order.
    assert max_seqlen_q > 1
    assert max(end - start for start, end in pairwise(starts)) <= max_seqlen_q
    assert max(lengths) <= max_seqlen_k <= block_table.shape[1] * k.shape[1]
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size[0], 0 if causal else window_size[1]
    tile_size = {64: 256, 128: 128}.get(q.shape[2], 64)
    output = torch.full_like(q, torch.nan)
    log_sums = torch.full((q.shape[1], q.shape[0]), torch.nan)
    for row, num_keys in enumerate(lengths):
        part = slice(starts[row], starts[row + 1])
        queries = q[part].double() * scale
        if len(queries):
            first = 0 if left < 0 else max(0, num_keys - len(queries) - left)
            first = first // tile_size * tile_size
            keys, values = look_up((k, v), block_table[row], first, num_keys)
            hidden = hidden_keys(len(queries), first, num_keys, left, right)
            attended, sums = attend(queries, keys, values, hidden, softcap, rounds=False)
            output[part], log_sums[:, part] = attended.to(q.dtype), sums.float()
    return (output, log_sums, torch.empty(0)) if return_attn_probs else output


def _check(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == block_table.stride(-1) == 1
    assert block_table.dtype == torch.int32
    assert k.shape == v.shape
    assert k.shape[1] % _PAGE_SIZE == 0
    assert q.shape[2] == k.shape[3] <= 256
    assert q.shape[2] % 8 == 0
    assert q.shape[1] % k.shape[2] == 0
