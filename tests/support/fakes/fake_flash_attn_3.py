"""flash-attn 3, as far as we call it, in plain torch: what its source checks and reads.

Its tiles are what matters here: it looks keys and values up a tile at a time from the first tile
in sight on, also where a window begins inside the tile, and multiplies every value that it looked
up with its weight, 0 or not. Beyond the last key of a row it looks nothing up. Over float8 it
rounds weights to float8, too. Metadata is good for the call that it was made for, and no other.
Sums are float64.

Operators of torch, with the schemas of the repository's builds and of vLLM's, on the CPU.

Shape letters: R rows, T tokens over all rows, H query heads, G key/value heads, D, E head sizes,
P page size, N pages.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
_FLOAT8 = torch.float8_e4m3fn
_TILE_SIZE = 128
# The largest weight is 2^8 before it is rounded, so that small ones keep some digits.
_LARGEST_WEIGHT = 256.0

# Names, types, order and defaults as builds register them.
REPOSITORY_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None,"
    " Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,"
    " Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None,"
    " int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None,"
    " Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None,"
    " Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None,"
    " Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None,"
    " bool is_causal=False, int window_size_left=-1, int window_size_right=-1,"
    " int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False,"
    " Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0)"
    " -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
REPOSITORY_METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads,"
    " int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None,"
    " Tensor? seqused_q=None, Tensor? leftpad_k=None, int? page_size=None,"
    " int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, int num_splits=0,"
    " bool? pack_gqa=None, int sm_margin=0) -> Tensor"
)
VLLM_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v,"
    " Tensor(out!)? out,"
    " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q,"
    " Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table,"
    " Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin,"
    " Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,"
    " float softmax_scale, bool is_causal, int window_size_left, int window_size_right,"
    " float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits,"
    " bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank,"
    " Tensor? cp_tot_seqused_k) -> Tensor[]"
)
VLLM_METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads,"
    " int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k,"
    " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q,"
    " Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal,"
    " int window_size_left, int window_size_right, bool has_softcap, int num_splits,"
    " bool? pack_gqa, int sm_margin) -> Tensor"
)
BUILDS = {
    "repository": (REPOSITORY_FORWARD, REPOSITORY_METADATA),
    "vllm": (VLLM_FORWARD, VLLM_METADATA),
}
# What a caller who wants nothing special passes, or leaves out.
_UNUSED: dict[str, object] = {
    "attention_chunk": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "max_seqlen_k_new": 0,
}
_NEITHER = ("is_rotary_interleaved",)


@functools.cache
def namespace(build: str) -> Any:  # noqa: ANN401
    """As `torch.ops.flash_attn_3` is once a build is loaded; `build`: one of BUILDS."""
    return register(f"imitated_flash_attn_3_{build}", *BUILDS[build])


def register(name: str, *schemas: str) -> Any:  # noqa: ANN401
    """The namespace `name` with operators of `schemas`."""
    untyped: Any = torch.library.Library
    library = untyped(name, "FRAGMENT")
    for schema in schemas:
        library.define(schema)
        imitation = _forward if schema.startswith("fwd") else _metadata
        library.impl(schema.split("(")[0], _by_name(schema, imitation), "CPU")
    _libraries.append(library)
    return getattr(torch.ops, name)


# What is registered goes with its library.
_libraries: list[object] = []


def _by_name(schema: str, imitation: Any) -> Any:  # noqa: ANN401
    """The operator is called in the order of its schema."""
    arguments = schema.partition("(")[2].partition(") ->")[0].split(",")
    names = [argument.split("=")[0].split()[-1] for argument in arguments]

    def call(*positional: Any, **named: Any) -> Any:  # noqa: ANN401
        return imitation(**dict(zip(names, positional, strict=False)), **named)

    return call


def _check_unused(unused: dict[str, object]) -> None:
    for name, value in unused.items():
        assert name in _NEITHER or value is None or value == _UNUSED[name], name


def _metadata(
    *,
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    headdim_v: int,
    qkv_dtype: torch.dtype,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor | None = None,
    page_size: int | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    has_softcap: bool = False,
    num_splits: int = 0,
    **unused: object,
) -> Tensor:
    """int32: the lengths, and of all else a fingerprint."""
    _check_unused(unused)
    assert cu_seqlens_q is not None
    assert batch_size == len(seqused_k) == len(cu_seqlens_q) - 1
    numbers = (max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v)
    mask = (is_causal, window_size_left, window_size_right, has_softcap, num_splits)
    fingerprint = hash((numbers, page_size, mask, str(qkv_dtype))) % 2**31
    last = torch.tensor([fingerprint], dtype=torch.int32)
    return torch.cat([seqused_k, cu_seqlens_q, last])


def _forward(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`q`: [T, H, D]; `k`, `v`: [N, P, G, D] and [N, P, G, E]; `cu_seqlens_q`: [R + 1] int32;
    `seqused_k`: [R] int32; `page_table`: [R, M] int32. Returns [T, H, E], which is `out` where
    that is given, and [H, T]; what belongs to no row is NaN, or as it was.
    """
    _check_unused(unused)
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert seqused_k is not None
    assert max_seqlen_q is not None
    _check(q, k, v, page_table)
    for integers in (cu_seqlens_q, seqused_k):
        assert integers.dtype == torch.int32
        assert integers.is_contiguous()
    num_rows = len(cu_seqlens_q) - 1
    assert page_table.shape[0] == num_rows == len(seqused_k)
    starts = cu_seqlens_q.tolist()
    assert max(end - start for start, end in pairwise(starts)) <= max_seqlen_q
    num_slots = page_table.shape[1] * k.shape[1]
    assert max_seqlen_k is None or int(seqused_k.max()) <= max_seqlen_k <= num_slots
    if scheduler_metadata is not None:
        expected = _metadata(
            batch_size=num_rows,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=num_slots if max_seqlen_k is None else max_seqlen_k,
            num_heads=q.shape[1],
            num_heads_k=k.shape[2],
            headdim=q.shape[2],
            headdim_v=v.shape[3],
            qkv_dtype=q.dtype,
            seqused_k=seqused_k,
            cu_seqlens_q=cu_seqlens_q,
            page_size=k.shape[1],
            is_causal=is_causal,
            window_size_left=window_size_left,
            window_size_right=window_size_right,
            has_softcap=softcap > 0,
            num_splits=num_splits,
        )
        assert torch.equal(scheduler_metadata, expected)
    descales = _descales(q.dtype, (q_descale, k_descale, v_descale), (num_rows, k.shape[2]))
    dtype = torch.bfloat16 if q.dtype == _FLOAT8 else q.dtype
    output = torch.full((*q.shape[:2], v.shape[3]), torch.nan, dtype=dtype) if out is None else out
    assert output.dtype == dtype
    assert output.shape == (*q.shape[:2], v.shape[3])
    assert output.stride(-1) == 1
    log_sums = torch.full((q.shape[1], q.shape[0]), torch.nan)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size_left, 0 if is_causal else window_size_right
    for row, num_keys in enumerate(seqused_k.tolist()):
        part = slice(starts[row], starts[row + 1])
        queries = _grouped(q[part].double() * scale, descales[0][row])
        if len(queries):
            first = 0 if left < 0 else max(0, num_keys - len(queries) - left)
            first = first // _TILE_SIZE * _TILE_SIZE
            keys, values = look_up((k, v), page_table[row], first, num_keys)
            keys, values = keys * descales[1][row, :, None], values * descales[2][row, :, None]
            hidden = hidden_keys(len(queries), first, num_keys, left, right)
            rounds = q.dtype == _FLOAT8
            attended, sums = attend(queries, keys, values, hidden, softcap, rounds=rounds)
            output[part], log_sums[:, part] = attended.to(dtype), sums.float()
    return output, log_sums, torch.empty(0), torch.empty(0)


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
        assert all(stride * q.dtype.itemsize % 16 == 0 for stride in tensor.stride()[:-1])


def _descales(
    dtype: torch.dtype, given: tuple[Tensor | None, ...], shape: tuple[int, int]
) -> list[Tensor]:
    """Of queries, keys and values, [R, G]; 1 if they are not given."""
    for each in given:
        if each is not None:
            assert dtype == _FLOAT8
            assert each.dtype == torch.float32
            assert each.shape == shape
    return [torch.ones(shape).double() if each is None else each.double() for each in given]


def _grouped(q: Tensor, descale: Tensor) -> Tensor:
    """`q`: [S, H, D]; `descale`: [G], each for the heads of a group."""
    return q * descale.repeat_interleave(q.shape[1] // len(descale))[None, :, None]


def look_up(
    caches: tuple[Tensor, Tensor], table: Tensor, first: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Keys and values at positions `first` .. `num_keys` - 1 of a row: [C, G, D] and [C, G, E]."""
    page_size = caches[0].shape[1]
    positions = torch.arange(first, num_keys)
    pages = table[positions // page_size].long()
    assert bool((pages >= 0).all())
    # Float8 has no indexing.
    places = pages * page_size + positions % page_size
    key, value = (cache.double().flatten(0, 1)[places] for cache in caches)
    return key, value


def hidden_keys(num_queries: int, first: int, num_keys: int, left: int, right: int) -> Tensor:
    """Which keys each query does not see, [S, C]; the last query stands at the last key."""
    at = torch.arange(num_keys - num_queries, num_keys)
    ahead = torch.arange(first, num_keys)[None, :] - at[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if right >= 0:
        hidden |= ahead > right
    if left >= 0:
        hidden |= ahead < -left
    return hidden


def attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, softcap: float, *, rounds: bool
) -> tuple[Tensor, Tensor]:
    """`q`: [S, H, D], scaled; `k`: [C, G, D]; `v`: [C, G, E]. Returns [S, H, E] and [H, S]."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("shd,chd->hsc", q, k.repeat_interleave(group, dim=1))
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(hidden, -torch.inf)
    log_sums = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    totals = weights.sum(dim=-1, keepdim=True)
    if rounds:
        weights = (weights * _LARGEST_WEIGHT).to(_FLOAT8).double() / _LARGEST_WEIGHT
    weights = weights / totals
    return torch.einsum("hsc,chd->shd", weights, v.repeat_interleave(group, dim=1)), log_sums
