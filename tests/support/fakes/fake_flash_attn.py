"""The package flash-attn, as far as we call it, in plain torch: what its documentation promises.

It checks what flash-attn checks, and like it takes as many keys of a row as the row has, aligns the
causal mask to the bottom right, and looks up no page wholly behind the window of a row's first
query. Sums are float64. Shape letters: R rows, T tokens over all rows, H query heads, G key/value
heads, D size of a head, P page size, N pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16)


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
) -> Tensor:
    """`q`: [T, H, D]; `k`, `v`: [N, P, G, D]; `cu_seqlens_*`: [R + 1] int32. Returns [T, H, D]."""
    assert dropout_p == 0.0
    assert alibi_slopes is None
    assert not return_attn_probs
    assert block_table is not None, "only paged keys and values are imitated"
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert cu_seqlens_k.is_contiguous()
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert int(lengths_q.max()) <= max_seqlen_q
    assert int(lengths_k.max()) <= max_seqlen_k
    # Then it takes the queries for a matrix with one line for each row.
    assert max_seqlen_q > 1 or q.shape[0] == len(lengths_q)
    _check(q, k, v, block_table, len(lengths_q))
    output = torch.full_like(q, torch.nan)
    starts = cu_seqlens_q.tolist()
    for row, num_keys in enumerate(lengths_k.tolist()):
        queries = slice(starts[row], starts[row + 1])
        output[queries] = _attend(
            q[queries],
            k,
            v,
            block_table[row],
            num_keys,
            softmax_scale,
            causal,
            window_size,
            softcap,
        )
    return output


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """`q`: [R, S, H, D]; caches: [N, P, G, D]; `cache_seqlens`: [R] int32. Returns [R, S, H, D]."""
    unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
    assert all(argument is None for argument in unused)
    assert not return_softmax_lse
    assert block_table is not None
    assert cache_seqlens is not None
    assert cache_seqlens.dtype == torch.int32
    _check(q, k_cache, v_cache, block_table, q.shape[0])
    rows = [
        _attend(
            q[row],
            k_cache,
            v_cache,
            block_table[row],
            num_keys,
            softmax_scale,
            causal,
            window_size,
            softcap,
        )
        for row, num_keys in enumerate(cache_seqlens.tolist())
    ]
    return torch.stack(rows)


def _check(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, num_rows: int) -> None:
    assert q.dtype in _DTYPES
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == block_table.stride(-1) == 1
    assert block_table.dtype == torch.int32
    assert block_table.shape[0] == num_rows > 0
    num_heads, head_dim = q.shape[-2:]
    _, page_size, num_kv_heads, _ = k.shape
    assert page_size % 256 == 0
    assert k.shape == v.shape
    assert k.shape[3] == head_dim <= 256
    assert head_dim % 8 == 0
    assert num_heads % num_kv_heads == 0


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    num_keys: int,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """One row. `q`: [S, H, D]; `table`: [M]. Returns [S, H, D]."""
    num_queries, num_heads, head_dim = q.shape
    page_size = k.shape[1]
    left, right = window[0], 0 if causal else window[1]
    first = 0 if left < 0 else max(0, num_keys - num_queries - left) // page_size * page_size
    positions = torch.arange(first, num_keys)
    pages, offsets = table[positions // page_size].long(), positions % page_size
    group = num_heads // k.shape[2]
    keys = k[pages, offsets].double().repeat_interleave(group, dim=1)
    values = v[pages, offsets].double().repeat_interleave(group, dim=1)
    scores = torch.einsum("shd,chd->hsc", q.double(), keys)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(num_queries) + num_keys - num_queries
    ahead = positions[None, :] - at[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if right >= 0:
        hidden |= ahead > right
    if left >= 0:
        hidden |= ahead < -left
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return torch.einsum("hsc,chd->shd", weights, values).to(q.dtype)
