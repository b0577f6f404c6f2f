"""Native paged attention against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitserve_kernels import reference
from splitserve_kernels.cpu import NativeAttention, NativeLibrary, why_not_native_attention
from splitserve_kernels.paged_batch import SLOT_SCALES, AttentionOptions
from tests.kernels.problems import (
    Shape,
    assert_close,
    attend_both,
    make_batch,
    make_pools,
    make_tables,
    make_tokens,
)

pytestmark = pytest.mark.cases(12)

DTYPES = (torch.float32, torch.bfloat16)
# Of 8-bit pools with a scale per token and head; None for pools of the dtype of queries.
CODES = (torch.int8, torch.float8_e4m3fn)
BLOCK_SIZES = (1, 3, 4, 8, 16, 24, 32, 48, 64, 256)
SHAPES = (
    Shape(1, 1, 32, 32, 1, ((0, 1),)),
    Shape(64, 8, 64, 64, 16, ((15, 1), (129, 3))),
    Shape(8, 8, 80, 80, 8, ((63, 1), (64, 70))),
    Shape(6, 2, 96, 40, 3, ((70, 2), (4, 1))),
    Shape(7, 1, 64, 100, 24, ((100, 1), (0, 33))),
    Shape(4, 2, 128, 128, 256, ((299, 1), (7, 20), (1000, 30))),
    Shape(8, 1, 256, 256, 16, ((65, 1), (1500, 1))),
    Shape(3, 3, 32, 5, 4, ((1020, 9), (0, 1), (1023, 1), (1024, 1))),
    Shape(16, 4, 32, 48, 48, ((47, 2), (48, 1), (0, 200))),
    Shape(2, 2, 6, 7, 3, ((1, 5), (0, 2))),
    Shape(4, 2, 128, 64, 32, ((1090, 40),)),
    Shape(128, 1, 32, 32, 64, ((63, 2),)),
)
PLAIN = Shape(8, 2, 32, 32, 16, ((0, 5), (15, 1), (16, 20), (129, 1)))
GAPS = Shape(4, 2, 32, 32, 8, ((9, 0), (0, 3), (70, 1), (20, 0), (30, 9), (5, 0)))
WINDOWED = Shape(4, 2, 32, 64, 8, ((100, 1), (0, 90), (63, 30), (1100, 2)))


_SINKS = torch.linspace(-2, 9, PLAIN.num_heads)
_SINKS[3] = -torch.inf


def _bias(shape: Shape, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return 3 * torch.randn(shape.num_heads, count, generator=generator)


CASES: tuple[tuple[Shape, AttentionOptions], ...] = (
    *((shape, AttentionOptions(scale=shape.key_dim**-0.5)) for shape in SHAPES),
    *(
        (
            Shape(4, 2, 64, 64, block_size, ((0, 70), (1010, 20), (300, 1), (130, 1))),
            AttentionOptions(scale=0.125),
        )
        for block_size in BLOCK_SIZES
    ),
    # A long context.
    (Shape(4, 1, 64, 64, 16, ((8191, 1), (8185, 7))), AttentionOptions(scale=0.125)),
    *(
        (
            replace(WINDOWED, block_size=block_size),
            AttentionOptions(scale=0.2, sliding_window=window),
        )
        for window in (1, 2, 9, 64, 1000)
        for block_size in (3, 16, 64)
    ),
    # Scores of up to 100, where tanh is 1 or -1.
    *((PLAIN, AttentionOptions(scale=3.0, softcap=softcap)) for softcap in (0.5, 30.0)),
    (PLAIN, AttentionOptions(scale=0.3, sliding_window=50, sinks=_SINKS)),
    *(
        (shape, AttentionOptions(scale=0.2, softcap=5.0, relative_bias=_bias(shape, count)))
        for shape, count in ((PLAIN, 1), (PLAIN, 37), (SHAPES[5], 128), (SHAPES[3], 70))
    ),
    # Rows without tokens.
    *((GAPS, AttentionOptions(scale=0.3, sliding_window=window)) for window in (None, 10)),
)
_SETTINGS = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    group, num_kv_heads = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    # The oracle divides by the length of a row: it takes none that is empty.
    counts = st.tuples(st.integers(0, 1500), st.integers(0, 40)).filter(any)
    return Shape(
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        key_dim=draw(st.sampled_from([32, 64, 80, 96, 128, 256])),
        value_dim=draw(st.sampled_from([17, 32, 64, 80, 128])),
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        rows=tuple(draw(st.lists(counts, min_size=1, max_size=3))),
    )


@pytest.mark.cases(64)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "options"), CASES)
def test_attention_equals_oracle(
    library: NativeLibrary, shape: Shape, options: AttentionOptions, dtype: torch.dtype
) -> None:
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.to(dtype))
    assert_close(*attend_both(NativeAttention(library), shape, options, dtype))


# Scales of float32 are whole elements of a head. How codes are stored does not depend on options.
_CODED_CASES = [
    (shape, options)
    for shape, options in CASES
    if shape.key_dim % 4 == 0 and shape.value_dim % 4 == 0
][::2]


@pytest.mark.cases(64)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("shape", "options"), _CODED_CASES)
def test_attention_equals_oracle_when_pools_have_codes(
    library: NativeLibrary,
    shape: Shape,
    options: AttentionOptions,
    codes: torch.dtype,
    dtype: torch.dtype,
) -> None:
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.to(dtype))
    assert_close(*attend_both(NativeAttention(library), shape, options, dtype, codes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES)
def test_write_kv_stores_the_bytes_of_the_oracle_when_blocks_have_one_token(
    library: NativeLibrary, codes: torch.dtype, dtype: torch.dtype
) -> None:
    # With one token and one head, keys and values have no order of their own.
    shape = Shape(1, 1, 64, 36, 1, ())
    tokens = make_tokens(shape, 3000, dtype, seed=0)
    tokens.key[5], tokens.value[6], tokens.key[7, 0, 3] = 0.0, 1e-38, torch.inf
    tokens.key[8], tokens.key[9] = tokens.key[8] * 1e-3, tokens.key[9] * 1e30
    batch = make_batch(torch.arange(3000)[None], [(0, 3000)], 1)
    written = []
    for backend in (NativeAttention(library), reference):
        pools = make_pools(shape, 3000, codes, SLOT_SCALES)
        backend.write_kv(tokens.key, tokens.value, *pools, batch, SLOT_SCALES)
        written.append([pool.view(torch.uint8).flatten(1) for pool in pools])
    for native, expected in zip(*written, strict=True):
        is_finite = expected[:, -4:].contiguous().view(torch.float32).isfinite().flatten()
        assert torch.equal(native[is_finite], expected[is_finite])
        # One that is not finite makes NaN of its token and head.
        scales = native[~is_finite, -4:].contiguous().view(torch.float32)
        assert bool(scales.isnan().all())


@pytest.mark.cases(2)
@given(
    shape=shapes(),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 1000),
    softcap=st.none() | st.sampled_from([0.5, 30.0]),
    has_sinks=st.booleans(),
)
@_SETTINGS
def test_attention_equals_oracle_when_everything_is_random(
    library: NativeLibrary,
    shape: Shape,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    sinks = torch.linspace(-2, 4, shape.num_heads) if has_sinks else None
    options = AttentionOptions(shape.key_dim**-0.5, window, softcap, sinks)
    assert_close(*attend_both(NativeAttention(library), shape, options, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_returns_nothing_when_there_are_no_rows(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    shape = replace(PLAIN, rows=())
    pools, tokens = make_pools(shape, 2, dtype), make_tokens(shape, 0, dtype, 0)
    batch = make_batch(torch.empty(0, 0, dtype=torch.int64), (), shape.block_size)
    backend = NativeAttention(library)
    backend.write_kv(tokens.key, tokens.value, *pools, batch)
    output = backend.paged_attention(tokens.query, *pools, batch, AttentionOptions(1.0))
    assert output.shape == (0, shape.num_heads, shape.value_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_says_nan_when_a_query_is_nan(
    library: NativeLibrary, has_sinks: bool, dtype: torch.dtype
) -> None:
    tables, num_blocks = make_tables([20], PLAIN.block_size, 0)
    pools, tokens = make_pools(PLAIN, num_blocks, dtype), make_tokens(PLAIN, 20, dtype, 0)
    tokens.query[7, 5] = torch.nan
    batch = make_batch(tables, [(0, 20)], PLAIN.block_size)
    backend = NativeAttention(library)
    backend.write_kv(tokens.key, tokens.value, *pools, batch)
    sinks = torch.zeros(PLAIN.num_heads) if has_sinks else None
    options = AttentionOptions(1.0, sinks=sinks)
    is_nan = backend.paged_attention(tokens.query, *pools, batch, options).isnan()
    assert bool(is_nan[7, 5].all())
    assert int(is_nan.sum()) == PLAIN.value_dim


@pytest.mark.parametrize("dtype", DTYPES)
@given(block=st.integers(0, 3), block_size=st.sampled_from(BLOCK_SIZES))
@example(block=2, block_size=3)
@_SETTINGS
def test_write_kv_leaves_other_blocks_alone_when_it_writes_one(
    library: NativeLibrary, dtype: torch.dtype, block: int, block_size: int
) -> None:
    shape = Shape(3, 3, 32, 5, block_size, ())
    pools, tokens = make_pools(shape, 4, dtype), make_tokens(shape, block_size, dtype, 0)
    batch = make_batch(torch.tensor([[block]]), [(0, block_size)], block_size)
    NativeAttention(library).write_kv(tokens.key, tokens.value, *pools, batch)
    for pool in pools:
        is_written = ~pool.isnan().flatten(1)
        assert bool(is_written[block].all())
        assert int(is_written.sum()) == pool[0].numel()


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 36)), min_size=1, max_size=2),
    dims=st.sampled_from([(32, 32), (6, 5), (80, 36)]),
    block_size=st.sampled_from([3, 8, 16, 48]),
    is_in_order=st.booleans(),
)
@example(rows=[(5, 60)], dims=(80, 36), block_size=16, is_in_order=True)
@example(rows=[(0, 64), (16, 16)], dims=(32, 32), block_size=16, is_in_order=False)
@_SETTINGS
def test_write_kv_stores_the_same_bytes_when_tokens_come_one_at_a_time(
    library: NativeLibrary,
    dtype: torch.dtype,
    rows: list[tuple[int, int]],
    dims: tuple[int, int],
    block_size: int,
    is_in_order: bool,
) -> None:
    shape = Shape(2, 2, *dims, block_size, ())
    tables, num_blocks = make_tables([sum(row) for row in rows], block_size, 0)
    if is_in_order:
        tables = torch.arange(tables.numel()).view_as(tables)
        num_blocks = tables.numel()
    tokens = make_tokens(shape, sum(new for _, new in rows), dtype, seed=0)
    backend = NativeAttention(library)
    together = make_pools(shape, num_blocks, dtype)
    whole = make_batch(tables, rows, block_size)
    backend.write_kv(tokens.key, tokens.value, *together, whole)
    one_by_one = make_pools(shape, num_blocks, dtype)
    places = [(i, computed + j) for i, (computed, new) in enumerate(rows) for j in range(new)]
    for token, (row, position) in enumerate(places):
        batch = make_batch(tables[row : row + 1], [(position, 1)], block_size)
        own = slice(token, token + 1)
        backend.write_kv(tokens.key[own], tokens.value[own], *one_by_one, batch)
    for a, b in zip(together, one_by_one, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    ("key_dim", "dtype", "is_possible"),
    [
        (80, torch.float32, True),
        (33, torch.float32, True),
        (80, torch.bfloat16, True),
        (33, torch.bfloat16, False),
        (80, torch.float16, False),
    ],
)
def test_why_not_native_attention_tells_what_kernels_take_when_asked(
    key_dim: int, dtype: torch.dtype, is_possible: bool
) -> None:
    assert (why_not_native_attention((key_dim, 64), dtype) is None) == is_possible
