"""Prefill attention against the oracle; rows with one new token, or none, are mixed in.

Whole, a program to a tile of queries, and split, where programs share the keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve_kernels.gpu.launch import LayerPools
from splitserve_kernels.paged_batch import (
    UNIT_SCALES,
    AttentionOptions,
    KVScales,
    build_paged_batch,
)
from tests.kernels.gpu.problems import (
    Problem,
    Shape,
    assert_close,
    attend_by_oracle,
    hide_what_is_behind,
    make_problem,
)

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.attention.backend import paged_prefill
from splitserve_kernels.gpu.attention.paged_decode import paged_split_prefill

pytestmark = pytest.mark.cases(6)

SHAPES = (
    Shape(1, 1, 32, 32, 1, ((0, 1), (0, 2), (3, 30))),
    Shape(64, 2, 64, 64, 16, ((0, 9), (40, 1))),
    Shape(6, 2, 80, 80, 8, ((0, 33), (64, 1), (63, 20))),
    Shape(3, 3, 96, 40, 3, ((31, 4), (7, 70))),
    Shape(71, 1, 64, 64, 32, ((30, 3),)),
    Shape(4, 2, 128, 128, 256, ((200, 70),)),
    Shape(4, 1, 256, 256, 16, ((17, 20),)),
    # A group of more heads than a tile.
    Shape(20, 1, 300, 512, 16, ((17, 3), (0, 1))),
)
MIXED = Shape(8, 2, 32, 32, 16, ((20, 1), (0, 40), (9, 0), (33, 17), (100, 1), (70, 0)))
DTYPES = (torch.float16, torch.bfloat16)


def _prefill(
    num_programs: int | None,
    problem: Problem,
    options: AttentionOptions,
    scales: KVScales = UNIT_SCALES,
    first_row: int = 0,
) -> torch.Tensor:
    """`num_programs`: how many share the keys; None for whole."""
    pools = LayerPools(problem.key_pool, problem.value_pool, scales)
    num_tokens, num_heads, _ = problem.query.shape
    # NaN: all is to be written.
    shape = (num_tokens, num_heads, problem.value_pool.shape[3])
    output = problem.query.new_full(shape, torch.nan)
    attend = paged_prefill
    if num_programs is not None:
        attend = partial(paged_split_prefill, num_programs=num_programs)
    attend(problem.query, pools, problem.batch, options, output, first_row=first_row)
    return output


Prefill = Callable[..., torch.Tensor]


@pytest.fixture(params=[None, 1, 5], ids=["whole", "1", "5"])
def prefill(request: pytest.FixtureRequest) -> Prefill:
    """Of the whole, or split among so many programs."""
    return partial(_prefill, request.param)


@pytest.mark.parametrize("shape", [*SHAPES, MIXED])
def test_prefill_equals_oracle_when_shapes_are_odd(
    shape: Shape, prefill: Prefill, device: torch.device
) -> None:
    problem, options = make_problem(shape, device), AttentionOptions(scale=0.3)
    assert_close(prefill(problem, options), attend_by_oracle(problem, options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[6], MIXED])
def test_prefill_equals_oracle_when_numbers_have_16_bits(
    shape: Shape, dtype: torch.dtype, prefill: Prefill, device: torch.device
) -> None:
    problem, options = make_problem(shape, device, dtype), AttentionOptions(scale=0.3)
    actual = prefill(problem, options)
    assert actual.dtype == dtype
    assert_close(actual, attend_by_oracle(problem, options))


def test_prefill_equals_oracle_when_a_row_fills_many_tiles(
    prefill: Prefill, device: torch.device
) -> None:
    shape = Shape(2, 1, 32, 32, 16, ((40, 3), (100, 200)))
    problem, options = make_problem(shape, device), AttentionOptions(scale=0.3)
    assert_close(prefill(problem, options), attend_by_oracle(problem, options))


def test_prefill_finds_the_row_when_there_are_hundreds(
    prefill: Prefill, device: torch.device
) -> None:
    rows = tuple((row % 5, 40 if row == 129 else 1 + row % 2) for row in range(132))
    problem = make_problem(Shape(1, 1, 32, 32, 16, rows), device)
    options = AttentionOptions(scale=0.3)
    assert_close(prefill(problem, options), attend_by_oracle(problem, options))


@pytest.mark.parametrize("window", [2, 9, 64, 1000])
@pytest.mark.parametrize("shape", [SHAPES[2], MIXED])
def test_prefill_sees_the_window_alone_when_it_slides(
    shape: Shape, window: int, prefill: Prefill, device: torch.device
) -> None:
    options = AttentionOptions(scale=0.3, sliding_window=window)
    problem = make_problem(shape, device)
    expected = attend_by_oracle(problem, options)
    hide_what_is_behind(problem, shape, window)
    assert_close(prefill(problem, options), expected)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_prefill_equals_oracle_when_scores_are_capped(
    softcap: float, prefill: Prefill, device: torch.device
) -> None:
    problem, options = make_problem(MIXED, device), AttentionOptions(0.3, softcap=softcap)
    assert_close(prefill(problem, options), attend_by_oracle(problem, options))


@pytest.mark.parametrize("window", [None, 20])
def test_prefill_equals_oracle_when_heads_have_sinks(
    window: int | None, prefill: Prefill, device: torch.device
) -> None:
    sinks = torch.linspace(-2, 9, MIXED.num_heads).to(device)
    sinks[3] = -torch.inf
    options = AttentionOptions(scale=0.3, sliding_window=window, sinks=sinks)
    problem = make_problem(MIXED, device)
    assert_close(prefill(problem, options), attend_by_oracle(problem, options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_equals_oracle_when_pools_have_8_bits(
    dtype: torch.dtype, prefill: Prefill, device: torch.device
) -> None:
    problem, options = make_problem(SHAPES[2], device, dtype), AttentionOptions(scale=0.3)
    narrow = (
        problem.key_pool.to(torch.float8_e4m3fn),
        problem.value_pool.to(torch.float8_e4m3fn),
    )
    actual = prefill(problem.with_pools(*narrow), options, KVScales(key=0.7, value=1.6))
    wide = problem.with_pools(narrow[0].float() * 0.7, narrow[1].float() * 1.6)
    assert_close(actual, attend_by_oracle(wide, options))


def test_prefill_returns_nothing_when_there_are_no_rows(
    prefill: Prefill, device: torch.device
) -> None:
    none = torch.empty(0, dtype=torch.int32)
    batch = build_paged_batch(none.view(0, 0), none, none, 16, device)
    pool = torch.zeros(2, 16, 2, 32, device=device)
    query = torch.empty(0, 4, 32, device=device)
    output = prefill(Problem(query, pool, pool, batch), AttentionOptions(scale=1.0))
    assert output.shape == (0, 4, 32)


@pytest.mark.parametrize("first_row", [1, 3])
def test_prefill_leaves_decodes_alone_when_they_come_first(
    first_row: int, prefill: Prefill, device: torch.device
) -> None:
    shape = Shape(8, 2, 32, 32, 16, ((20, 1), (0, 1), (9, 1), (33, 170), (100, 1), (70, 0), (5, 3)))
    problem, options = make_problem(shape, device), AttentionOptions(scale=0.3)
    output = prefill(problem, options, first_row=first_row)
    assert bool(output[:first_row].isnan().all())
    assert_close(output[first_row:], attend_by_oracle(problem, options)[first_row:])


# Of tiles of 64 keys and of few queries: rows that are one program's, whose first or last keys are,
# and all between; prompts of several tiles of queries.
UNEVEN = Shape(2, 1, 16, 16, 16, ((1500, 9), *(((70, 3),) * 4), (0, 170), (5, 0), (900, 130)))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_programs", [2, 7, 80])
def test_split_prefill_equals_oracle_when_a_few_tokens_are_far_on(
    num_programs: int, window: int | None, device: torch.device
) -> None:
    options = AttentionOptions(scale=0.3, sliding_window=window)
    problem = make_problem(UNEVEN, device)
    expected = attend_by_oracle(problem, options)
    if window is not None:
        hide_what_is_behind(problem, UNEVEN, window)
    assert_close(_prefill(num_programs, problem, options), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_prefill_equals_oracle_when_a_turn_of_a_chat_is_behind_30_000_tokens(
    dtype: torch.dtype, device: torch.device
) -> None:
    problem = make_problem(Shape(4, 1, 16, 16, 16, ((30_000, 20), (5, 2))), device, dtype)
    options = AttentionOptions(scale=0.3)
    assert_close(_prefill(7, problem, options), attend_by_oracle(problem, options))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("num_programs", [1, 5])
def test_split_prefill_says_nan_for_the_query_alone_when_it_is_nan(
    num_programs: int, device: torch.device
) -> None:
    problem = make_problem(MIXED, device)
    problem.query[3, 5] = torch.nan
    is_nan = _prefill(num_programs, problem, AttentionOptions(scale=0.3)).isnan()
    assert bool(is_nan[3, 5].all())
    assert int(is_nan.sum()) == problem.value_pool.shape[3]


@settings(max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "25")) // 5)
@given(
    rows=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 90)), min_size=1, max_size=5),
    num_programs=st.integers(1, 20),
    window=st.none() | st.integers(1, 300),
    has_sinks=st.booleans(),
)
def test_split_prefill_equals_oracle_whatever_the_lengths_are(
    rows: list[tuple[int, int]], num_programs: int, window: int | None, has_sinks: bool
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sinks = torch.linspace(-2, 9, 4).to(device) if has_sinks else None
    options = AttentionOptions(scale=0.3, sliding_window=window, sinks=sinks)
    problem = make_problem(Shape(4, 2, 16, 16, 16, tuple(rows)), device)
    assert_close(_prefill(num_programs, problem, options), attend_by_oracle(problem, options))
