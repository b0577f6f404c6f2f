"""flash-attn 3, as far as we call it, in plain torch: what its source checks and reads.

Its tiles are what matters here: it looks keys and values up a tile at a time from the first tile
in sight on, also where a window begins inside the tile, and multiplies every value that it looked
up with its weight, 0 or not. Beyond the last key of a row it looks nothing up. Sums are float64.
Shape letters: R rows, T tokens over all rows, H query heads, G key/value heads, D, E head sizes,
P page size, N pages.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16)
_TILE_SIZE = 128


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """`q`: [T, H, D]; caches: [N, P, G, D] and [N, P, G, E]; `cu_seqlens_q`: [R + 1] int32;
    `cache_seqlens`: [R] int32; `page_table`: [R, M] int32. Returns [T, H, E].
    """
    unused = (k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new)
    unused += (rotary_seqlens, q_descale, k_descale, v_descale, scheduler_metadata)
    assert all(argument is None for argument in unused)
    assert not return_softmax_lse
    assert attention_chunk == 0
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert cache_seqlens is not None
    assert max_seqlen_q is not None
    _check(q, k_cache, v_cache, page_table)
    for integers in (cu_seqlens_q, cache_seqlens):
        assert integers.dtype == torch.int32
        assert integers.is_contiguous()
    num_rows = len(cu_seqlens_q) - 1
    assert page_table.shape[0] == num_rows == len(cache_seqlens)
    starts = cu_seqlens_q.tolist()
    assert max(end - start for start, end in pairwise(starts)) <= max_seqlen_q
    output = q.new_full((*q.shape[:2], v_cache.shape[3]), torch.nan)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size[0], 0 if causal else window_size[1]
    for row, num_keys in enumerate(cache_seqlens.tolist()):
        queries = q[starts[row] : starts[row + 1]].double() * scale
        if len(queries):
            first = 0 if left < 0 else max(0, num_keys - len(queries) - left)
            first = first // _TILE_SIZE * _TILE_SIZE
            keys, values = _look_up((k_cache, v_cache), page_table[row], first, num_keys)
            hidden = _hidden(len(queries), first, num_keys, left, right)
            attended = _attend(queries, keys, values, hidden, softcap)
            output[starts[row] : starts[row + 1]] = attended.to(q.dtype)
    return output


def _check(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor) -> None:
    assert q.dtype in _DTYPES
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == page_table.stride(-1) == 1
    assert page_table.dtype == torch.int32
    assert k.shape[:3] == v.shape[:3]
    assert q.shape[2] == k.shape[3]
    assert q.shape[1] % k.shape[2] == 0
    # Copies of 16 bytes.
    for tensor in (q, k, v):
        assert tensor.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in tensor.stride()[:-1])


def _look_up(
    caches: tuple[Tensor, Tensor], table: Tensor, first: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    page_size = caches[0].shape[1]
    positions = torch.arange(first, num_keys)
    pages = table[positions // page_size].long()
    assert bool((pages >= 0).all())
    key, value = (cache[pages, positions % page_size].double() for cache in caches)
    return key, value


def _hidden(num_queries: int, first: int, num_keys: int, left: int, right: int) -> Tensor:
    """Which keys each query does not see, [S, C]; the last query stands at the last key."""
    at = torch.arange(num_keys - num_queries, num_keys)
    ahead = torch.arange(first, num_keys)[None, :] - at[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if right >= 0:
        hidden |= ahead > right
    if left >= 0:
        hidden |= ahead < -left
    return hidden


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, softcap: float) -> Tensor:
    """`q`: [S, H, D], scaled; `k`: [C, G, D]; `v`: [C, G, E]. Returns [S, H, E]."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("shd,chd->hsc", q, k.repeat_interleave(group, dim=1))
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return torch.einsum("hsc,chd->shd", weights, v.repeat_interleave(group, dim=1))
