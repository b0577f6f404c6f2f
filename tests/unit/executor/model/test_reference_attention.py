"""The reference backend against torch's own attention, dense and one row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from splitserve_kernels.paged_batch import AttentionOptions, PagedBatch, build_paged_batch
from splitserve_kernels.reference import paged_attention, write_kv

# Float32 sums in different orders.
TOLERANCE = 2e-6


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    # (num_computed, num_new) of each row
    rows: tuple[tuple[int, int], ...]


SHAPES = (
    Shape(1, 1, 1, 1, 1, ((0, 1),)),
    Shape(4, 2, 16, 16, 8, ((0, 5), (8, 1), (7, 9))),
    Shape(6, 3, 10, 14, 3, ((0, 1), (3, 1), (2, 7), (31, 4))),
    Shape(8, 1, 24, 12, 16, ((15, 2), (16, 1), (0, 33))),
    Shape(3, 3, 7, 5, 256, ((100, 1), (0, 64))),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """`keys`, `values` of all tokens of each row, computed and new; `query` of the new ones."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    key_pool: Tensor
    value_pool: Tensor
    batch: PagedBatch


def _make_problem(shape: Shape, seed: int = 0) -> Problem:
    """Old tokens are already in the pools, new ones not; all other slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [computed + new for computed, new in shape.rows]
    num_blocks = [-(-length // shape.block_size) for length in lengths]
    order = torch.randperm(sum(num_blocks) + 2, generator=generator).tolist()
    tables = torch.full((len(lengths), max(num_blocks)), -1)
    key_pool = torch.full(
        (len(order), shape.block_size, shape.num_kv_heads, shape.key_dim), torch.nan
    )
    value_pool = torch.full((*key_pool.shape[:3], shape.value_dim), torch.nan)
    keys, values = [], []
    for row, ((computed, _), length) in enumerate(zip(shape.rows, lengths, strict=True)):
        for block in range(num_blocks[row]):
            tables[row, block] = order.pop()
        keys.append(torch.randn(length, *key_pool.shape[2:], generator=generator))
        values.append(torch.randn(length, *value_pool.shape[2:], generator=generator))
        for position in range(computed):
            slot = (int(tables[row, position // shape.block_size]), position % shape.block_size)
            key_pool[slot] = keys[row][position]
            value_pool[slot] = values[row][position]
    num_new = [new for _, new in shape.rows]
    batch = build_paged_batch(
        tables,
        torch.tensor([computed for computed, _ in shape.rows]),
        torch.tensor(num_new),
        shape.block_size,
    )
    query = torch.randn(sum(num_new), shape.num_heads, shape.key_dim, generator=generator)
    return Problem(query, keys, values, key_pool, value_pool, batch)


def _run(shape: Shape, problem: Problem, options: AttentionOptions) -> list[Tensor]:
    """Writes what is new and attends; the output of each row."""
    new_keys = [key[computed:] for key, (computed, _) in zip(problem.keys, shape.rows, strict=True)]
    new_values = [
        value[computed:] for value, (computed, _) in zip(problem.values, shape.rows, strict=True)
    ]
    write_kv(
        torch.cat(new_keys),
        torch.cat(new_values),
        problem.key_pool,
        problem.value_pool,
        problem.batch,
    )
    output = paged_attention(
        problem.query, problem.key_pool, problem.value_pool, problem.batch, options
    )
    return list(torch.split(output, [new for _, new in shape.rows]))


def _dense(
    query: Tensor, key: Tensor, value: Tensor, computed: int, options: AttentionOptions
) -> Tensor:
    """One row through torch's scaled_dot_product_attention, with an explicit mask."""
    num_new, num_heads, _ = query.shape
    length = key.shape[0]
    repeats = num_heads // key.shape[1]
    key = key.repeat_interleave(repeats, dim=1).transpose(0, 1)
    value = value.repeat_interleave(repeats, dim=1).transpose(0, 1)
    bias = torch.zeros(num_heads, num_new, length)
    for i in range(num_new):
        for j in range(length):
            distance = computed + i - j
            window = options.sliding_window
            if distance < 0 or (window is not None and distance >= window):
                bias[:, i, j] = -torch.inf
    if options.sinks is not None:
        # A sink is a key whose score is its bias and whose value is nothing.
        bias = torch.cat([bias, options.sinks[:, None, None].expand(-1, num_new, 1)], dim=-1)
        key = torch.cat([key, torch.zeros_like(key[:, :1])], dim=1)
        value = torch.cat([value, torch.zeros_like(value[:, :1])], dim=1)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key, value, attn_mask=bias, scale=options.scale
    )
    return output.transpose(0, 1)


def _assert_equals_dense(shape: Shape, options: AttentionOptions) -> None:
    problem = _make_problem(shape)
    queries = torch.split(problem.query, [new for _, new in shape.rows])
    for row, actual in enumerate(_run(shape, problem, options)):
        computed = shape.rows[row][0]
        expected = _dense(queries[row], problem.keys[row], problem.values[row], computed, options)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_paged_attention_equals_dense_when_shapes_are_odd(shape: Shape) -> None:
    _assert_equals_dense(shape, AttentionOptions(scale=0.3))


@pytest.mark.parametrize("window", [1, 2, 8, 9, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_paged_attention_equals_dense_when_window_slides(shape: Shape, window: int) -> None:
    _assert_equals_dense(shape, AttentionOptions(scale=0.3, sliding_window=window))


@pytest.mark.parametrize("window", [1, 2, 8, 9, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_paged_attention_reads_nothing_behind_the_window_when_blocks_there_are_gone(
    shape: Shape, window: int
) -> None:
    options = AttentionOptions(scale=0.3, sliding_window=window)
    expected = _run(shape, _make_problem(shape), options)
    problem = _make_problem(shape)
    for row, (computed, _) in enumerate(shape.rows):
        num_behind = max(0, computed - window + 1)
        table = problem.batch.block_tables[row]
        for position in range(num_behind):
            slot = (int(table[position // shape.block_size]), position % shape.block_size)
            problem.key_pool[slot] = problem.value_pool[slot] = torch.nan
        table[: num_behind // shape.block_size] = -1
    for actual, truth in zip(_run(shape, problem, options), expected, strict=True):
        assert torch.equal(actual, truth)


@pytest.mark.parametrize("shape", SHAPES)
def test_paged_attention_looks_up_no_block_behind_the_window_when_its_id_is_wild(
    shape: Shape,
) -> None:
    options = AttentionOptions(scale=0.3, sliding_window=2)
    problem, stale = _make_problem(shape), _make_problem(shape)
    for row, (computed, _) in enumerate(shape.rows):
        num_behind = max(0, computed - 1) // shape.block_size
        stale.batch.block_tables[row, :num_behind] = 10**6
    expected = _run(shape, problem, options)
    for actual, truth in zip(_run(shape, stale, options), expected, strict=True):
        assert torch.equal(actual, truth)


def test_paged_attention_equals_dense_when_a_long_row_has_a_short_window() -> None:
    shape = Shape(2, 1, 8, 8, 16, ((70, 300),))
    _assert_equals_dense(shape, AttentionOptions(scale=0.3, sliding_window=5))
    _assert_equals_dense(shape, AttentionOptions(scale=0.3, sliding_window=90))


@pytest.mark.parametrize("shape", SHAPES)
def test_paged_attention_equals_dense_when_heads_have_sinks(shape: Shape) -> None:
    sinks = torch.linspace(-2, 3, shape.num_heads)
    _assert_equals_dense(shape, AttentionOptions(scale=0.3, sliding_window=6, sinks=sinks))


@pytest.mark.parametrize("shape", SHAPES)
def test_paged_attention_equals_dense_when_a_row_goes_in_pieces(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitserve_kernels.reference._SCORES_AT_A_TIME", 100)
    _assert_equals_dense(shape, AttentionOptions(scale=0.3, sliding_window=11))


def test_paged_attention_caps_scores_when_softcap_is_set() -> None:
    shape = Shape(2, 1, 4, 4, 4, ((3, 2),))
    problem = _make_problem(shape)
    (actual,) = _run(shape, problem, AttentionOptions(scale=2.0, softcap=1.5))
    for i in range(2):
        keys, values = problem.keys[0][: 4 + i, 0], problem.values[0][: 4 + i, 0]
        for head in range(2):
            scores = (keys @ problem.query[i, head]) * 2.0
            weights = torch.softmax(1.5 * torch.tanh(scores / 1.5), dim=0)
            torch.testing.assert_close(actual[i, head], weights @ values, atol=TOLERANCE, rtol=0)


def test_paged_attention_reads_new_tokens_of_another_row_when_they_share_a_block() -> None:
    # Row 0 fills block 1 in this step; row 1 has the same prefix and goes on behind it.
    tables = torch.tensor([[1, -1], [1, 0]])
    batch = build_paged_batch(tables, torch.tensor([0, 4]), torch.tensor([4, 1]), 4)
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(5, 1, 8, generator=generator) for _ in range(3))
    key_pool, value_pool = (torch.full((2, 4, 1, 8), torch.nan) for _ in range(2))
    write_kv(key, value, key_pool, value_pool, batch)
    options = AttentionOptions(scale=1.0)
    output = paged_attention(query, key_pool, value_pool, batch, options)
    expected = _dense(query[4:], key, value, 4, options)
    torch.testing.assert_close(output[4:], expected, atol=TOLERANCE, rtol=0)


def test_paged_attention_keeps_the_dtype_when_inputs_are_bfloat16() -> None:
    shape = SHAPES[1]
    problem = _make_problem(shape)
    options = AttentionOptions(scale=0.3)
    expected = torch.cat(_run(shape, problem, options))
    actual = paged_attention(
        problem.query.bfloat16(),
        problem.key_pool.bfloat16(),
        problem.value_pool.bfloat16(),
        problem.batch,
        options,
    )
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, atol=0.03, rtol=0)


def test_build_paged_batch_accepts_no_rows_when_nothing_is_computed() -> None:
    none = torch.empty(0, dtype=torch.int32)
    batch = build_paged_batch(torch.empty(0, 0, dtype=torch.int32), none, none, 16)
    assert batch.num_rows == 0
    assert batch.slot_mapping.shape == (0,)
    assert (batch.max_num_new_tokens, batch.max_num_tokens) == (0, 0)
