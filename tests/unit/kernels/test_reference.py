"""The reference backend against torch's own attention, dense and one row at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from splitserve_kernels.paged_batch import AttentionOptions, KVScales, build_paged_batch
from splitserve_kernels.reference import paged_attention, write_kv
from tests.kernels.problems import Problem, Shape, hide_what_is_behind, make_problem

FLOAT8 = torch.float8_e4m3fn
# Float32 sums in different orders.
TOLERANCE = 2e-6
SHAPES = (
    Shape(1, 1, 1, 1, 1, ((0, 1),)),
    Shape(4, 2, 16, 16, 8, ((0, 5), (8, 1), (7, 9))),
    Shape(6, 3, 10, 14, 3, ((0, 1), (3, 1), (2, 7), (31, 4))),
    Shape(8, 1, 24, 12, 16, ((15, 2), (16, 1), (0, 33))),
    Shape(3, 3, 7, 5, 256, ((100, 1), (0, 64))),
)
LONG = Shape(2, 1, 8, 8, 16, ((70, 300),))
WINDOWS = (1, 2, 8, 9, 1000)
CPU = torch.device("cpu")


def _attend(problem: Problem, options: AttentionOptions) -> Tensor:
    pools = (problem.key_pool, problem.value_pool)
    return paged_attention(problem.query, *pools, problem.batch, options)


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


@pytest.mark.cases(52)
@pytest.mark.parametrize("scores_at_a_time", [None, 100])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("shape", "window"),
    [*((shape, window) for shape in SHAPES for window in (None, *WINDOWS)), (LONG, 5), (LONG, 90)],
)
def test_paged_attention_equals_dense(
    shape: Shape,
    window: int | None,
    has_sinks: bool,
    scores_at_a_time: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when a row goes in pieces of so many scores."""
    if scores_at_a_time is not None:
        monkeypatch.setattr("splitserve_kernels.reference._SCORES_AT_A_TIME", scores_at_a_time)
    sinks = torch.linspace(-2, 3, shape.num_heads) if has_sinks else None
    options = AttentionOptions(scale=0.3, sliding_window=window, sinks=sinks)
    problem = make_problem(shape, CPU)
    new = [new for _, new in shape.rows]
    queries, outputs = torch.split(problem.query, new), torch.split(_attend(problem, options), new)
    for row, (computed, _) in enumerate(shape.rows):
        positions = torch.arange(shape.lengths[row])
        blocks = problem.batch.block_tables[row, positions // shape.block_size].long()
        key, value = (
            pool[blocks, positions % shape.block_size]
            for pool in (problem.key_pool, problem.value_pool)
        )
        expected = _dense(queries[row], key, value, computed, options)
        torch.testing.assert_close(outputs[row], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_paged_attention_reads_nothing_behind_the_window(shape: Shape, window: int) -> None:
    """Neither a block that is gone nor a block id that is wild."""
    options, problem = AttentionOptions(scale=0.3, sliding_window=window), make_problem(shape, CPU)
    expected = _attend(problem, options)
    hide_what_is_behind(problem, shape, window)
    assert torch.equal(_attend(problem, options), expected)


def test_paged_attention_caps_scores_when_softcap_is_set() -> None:
    problem = make_problem(Shape(2, 1, 4, 4, 4, ((3, 2),)), CPU)
    actual = _attend(problem, AttentionOptions(scale=2.0, softcap=1.5))
    table = problem.batch.block_tables[0].long()
    keys, values = (pool[table].flatten(0, 1) for pool in (problem.key_pool, problem.value_pool))
    for i in range(2):
        for head in range(2):
            scores = (keys[: 4 + i, 0] @ problem.query[i, head]) * 2.0
            weights = torch.softmax(1.5 * torch.tanh(scores / 1.5), dim=0)
            expected = weights @ values[: 4 + i, 0]
            torch.testing.assert_close(actual[i, head], expected, atol=TOLERANCE, rtol=0)


def test_paged_attention_reads_new_tokens_when_rows_share_a_block() -> None:
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
    options = AttentionOptions(scale=0.3)
    actual = _attend(make_problem(SHAPES[1], CPU, torch.bfloat16), options)
    assert actual.dtype == torch.bfloat16
    expected = _attend(make_problem(SHAPES[1], CPU), options)
    torch.testing.assert_close(actual.float(), expected, atol=0.03, rtol=0)


def test_build_paged_batch_accepts_no_rows_when_nothing_is_computed() -> None:
    none = torch.empty(0, dtype=torch.int32)
    batch = build_paged_batch(torch.empty(0, 0, dtype=torch.int32), none, none, 16)
    assert batch.num_rows == 0
    assert batch.slot_mapping.shape == (0,)
    assert (batch.max_num_new_tokens, batch.max_num_tokens) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_write_kv_stores_the_nearest_float8_when_it_writes(dtype: torch.dtype) -> None:
    # Every number that 8 bits can hold, and what lies beside it.
    grid = torch.arange(127, dtype=torch.uint8).view(FLOAT8).float()
    between = (grid[1:] + grid[:-1]) / 2
    numbers = torch.cat([grid, between * (1 - 2**-7), between * (1 + 2**-7), torch.tensor([1e4])])
    numbers = torch.cat([numbers, -numbers]).to(dtype)
    key_pool, value_pool = torch.zeros(2, 1, len(numbers), 1, 1, dtype=FLOAT8)
    count = torch.tensor([len(numbers)])
    batch = build_paged_batch(torch.tensor([[0]]), torch.tensor([0]), count, len(numbers))
    heads = numbers[:, None, None]
    write_kv(heads, -heads, key_pool, value_pool, batch)
    both = torch.cat([grid, -grid])
    nearest = both[(numbers.float()[:, None] - both).abs().argmin(dim=1)]
    torch.testing.assert_close(key_pool.float().flatten(), nearest, atol=0, rtol=0)
    torch.testing.assert_close(value_pool.float().flatten(), -nearest, atol=0, rtol=0)


def test_write_kv_keeps_nan_when_pools_are_float8() -> None:
    key_pool, value_pool = torch.zeros(2, 1, 1, 1, 1, dtype=FLOAT8)
    zero, one = torch.tensor([0]), torch.tensor([1])
    batch = build_paged_batch(torch.tensor([[0]]), zero, one, 1)
    number = torch.full((1, 1, 1), torch.nan)
    write_kv(number, number, key_pool, value_pool, batch)
    assert key_pool.float().isnan().all()


def test_reference_scales_when_it_writes_and_reads() -> None:
    tables, zero, count = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1), torch.tensor([4])
    batch = build_paged_batch(tables, zero.long(), count, 4)
    scales = KVScales(key=64.0, value=0.01)
    key, value = torch.full((4, 1, 8), 9000.0), torch.full((4, 1, 8), 0.02)
    key_pool, value_pool = (torch.zeros(1, 4, 1, 8, dtype=FLOAT8) for _ in range(2))
    write_kv(key, value, key_pool, value_pool, batch, scales)
    assert set(key_pool.float().flatten().tolist()) == {144.0}  # of 140.6
    assert set(value_pool.float().flatten().tolist()) == {2.0}
    query = torch.zeros(4, 1, 8)
    options = AttentionOptions(scale=1.0)
    output = paged_attention(query, key_pool, value_pool, batch, options, scales)
    torch.testing.assert_close(output, value)
