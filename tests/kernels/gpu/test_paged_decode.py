"""Decode attention, its keys shared among any number of programs, against the oracle."""

from __future__ import annotations

import os
from dataclasses import replace

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

from splitserve_kernels.gpu.attention.paged_decode import paged_decode

pytestmark = pytest.mark.cases(6)

SHAPES = (
    Shape(1, 1, 32, 32, 1, ((0, 1),)),
    Shape(64, 2, 64, 64, 16, ((15, 1), (129, 1))),
    Shape(3, 3, 80, 80, 8, ((63, 1), (64, 1))),
    Shape(6, 2, 96, 40, 3, ((70, 1), (4, 1))),
    Shape(71, 1, 64, 64, 32, ((100, 1),)),
    Shape(4, 2, 128, 128, 256, ((299, 1), (7, 1))),
    Shape(4, 1, 256, 256, 16, ((65, 1),)),
    # A group of more heads than a tile.
    Shape(20, 1, 512, 300, 16, ((40, 1), (3, 1))),
)
PLAIN = Shape(8, 2, 32, 32, 16, ((0, 1), (15, 1), (16, 1), (129, 1)))
# Rows without tokens may stand between others.
GAPS = Shape(4, 2, 32, 32, 8, ((9, 0), (0, 1), (70, 1), (20, 0), (30, 1), (5, 0)))


def _decode(
    problem: Problem,
    options: AttentionOptions,
    num_programs: int | None = None,
    scales: KVScales = UNIT_SCALES,
) -> torch.Tensor:
    pools = LayerPools(problem.key_pool, problem.value_pool, scales)
    output = _empty_output(problem)
    paged_decode(
        problem.query,
        pools,
        problem.batch,
        options,
        output,
        num_rows=problem.batch.num_rows,
        num_programs=num_programs,
    )
    return output


def _empty_output(problem: Problem) -> torch.Tensor:
    """NaN: all is to be written."""
    num_tokens, num_heads, _ = problem.query.shape
    value_dim = problem.value_pool.shape[3]
    return problem.query.new_full((num_tokens, num_heads, value_dim), torch.nan)


@pytest.mark.parametrize("num_programs", [1, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_equals_oracle_when_shapes_are_odd(
    shape: Shape, num_programs: int, device: torch.device
) -> None:
    problem, options = make_problem(shape, device), AttentionOptions(scale=0.3)
    assert_close(_decode(problem, options, num_programs), attend_by_oracle(problem, options))


@pytest.mark.parametrize("num_programs", [1, 2, 16])
def test_decode_equals_oracle_when_rows_have_no_tokens(
    num_programs: int, device: torch.device
) -> None:
    problem, options = make_problem(GAPS, device), AttentionOptions(scale=0.3)
    assert_close(_decode(problem, options, num_programs), attend_by_oracle(problem, options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_programs", [1, 5])
@pytest.mark.parametrize("shape", [PLAIN, SHAPES[2]])
def test_decode_equals_oracle_when_numbers_have_16_bits(
    shape: Shape, num_programs: int, dtype: torch.dtype, device: torch.device
) -> None:
    problem, options = make_problem(shape, device, dtype), AttentionOptions(scale=0.3)
    actual = _decode(problem, options, num_programs)
    assert actual.dtype == dtype
    assert_close(actual, attend_by_oracle(problem, options))


@pytest.mark.parametrize("num_programs", [1, 5])
@pytest.mark.parametrize("window", [1, 9, 64, 1000])
def test_decode_sees_the_window_alone_when_it_slides(
    window: int, num_programs: int, device: torch.device
) -> None:
    shape = Shape(4, 2, 32, 32, 8, ((100, 1), (0, 1), (63, 1), (64, 1)))
    options = AttentionOptions(scale=0.3, sliding_window=window)
    problem = make_problem(shape, device)
    expected = attend_by_oracle(problem, options)
    hide_what_is_behind(problem, shape, window)
    assert_close(_decode(problem, options, num_programs), expected)


@pytest.mark.parametrize("num_programs", [1, 5])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_decode_equals_oracle_when_scores_are_capped(
    softcap: float, num_programs: int, device: torch.device
) -> None:
    problem, options = make_problem(PLAIN, device), AttentionOptions(0.3, softcap=softcap)
    assert_close(_decode(problem, options, num_programs), attend_by_oracle(problem, options))


@pytest.mark.parametrize("num_programs", [1, 5])
def test_decode_equals_oracle_when_heads_have_sinks(
    num_programs: int, device: torch.device
) -> None:
    sinks = torch.linspace(-2, 9, PLAIN.num_heads).to(device)
    sinks[3] = -torch.inf
    options = AttentionOptions(scale=0.3, sliding_window=50, sinks=sinks)
    problem = make_problem(PLAIN, device)
    assert_close(_decode(problem, options, num_programs), attend_by_oracle(problem, options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_programs", [1, 5])
def test_decode_equals_oracle_when_pools_have_8_bits(
    num_programs: int, dtype: torch.dtype, device: torch.device
) -> None:
    problem, options = make_problem(SHAPES[2], device, dtype), AttentionOptions(scale=0.3)
    narrow = (
        problem.key_pool.to(torch.float8_e4m3fn),
        problem.value_pool.to(torch.float8_e4m3fn),
    )
    scales = KVScales(key=0.7, value=1.6)
    actual = _decode(problem.with_pools(*narrow), options, num_programs, scales)
    wide = problem.with_pools(narrow[0].float() * 0.7, narrow[1].float() * 1.6)
    assert_close(actual, attend_by_oracle(wide, options))


def test_decode_computes_in_float32_when_pools_have_another_dtype(device: torch.device) -> None:
    problem, options = make_problem(SHAPES[2], device, torch.float16), AttentionOptions(scale=0.3)
    problem = replace(problem, query=problem.query.float())
    assert_close(_decode(problem, options, 2), attend_by_oracle(problem, options))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("num_programs", [1, 5])
def test_decode_says_nan_when_a_query_is_nan(num_programs: int, device: torch.device) -> None:
    problem = make_problem(PLAIN, device)
    problem.query[1, 5] = torch.nan
    actual = _decode(problem, AttentionOptions(scale=0.3), num_programs)
    is_nan = actual.isnan()
    assert bool(is_nan[1, 5].all())
    assert int(is_nan.sum()) == actual.shape[2]


def test_decode_returns_nothing_when_there_are_no_rows(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int32)
    batch = build_paged_batch(none.view(0, 0), none, none, 16, device)
    pool = torch.zeros(2, 16, 2, 32, device=device)
    query = torch.empty(0, 4, 32, device=device)
    output = _decode(Problem(query, pool, pool, batch), AttentionOptions(scale=1.0))
    assert output.shape == (0, 4, 32)


# Of tiles of 64 keys: rows that are one program's, whose first or last keys are, and all between.
UNEVEN = Shape(2, 1, 16, 16, 16, (*(((70, 1),) * 5), (1500, 1), (0, 1), *(((63, 1),) * 4)))


@pytest.mark.parametrize("num_programs", [2, 7, 29, 80])
def test_decode_equals_oracle_when_one_row_is_much_longer(
    num_programs: int, device: torch.device
) -> None:
    problem, options = make_problem(UNEVEN, device), AttentionOptions(scale=0.3)
    assert_close(_decode(problem, options, num_programs), attend_by_oracle(problem, options))


def test_decode_finds_its_rows_when_there_are_hundreds(device: torch.device) -> None:
    # The kernel looks at 512 at a time.
    rows = (*(((9, 0),) * 510), (100, 1), (70, 1), (300, 1), (5, 1), (64, 1))
    problem = make_problem(Shape(1, 1, 16, 16, 16, rows), device)
    options = AttentionOptions(scale=0.3)
    assert_close(_decode(problem, options, 3), attend_by_oracle(problem, options))


@settings(max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "25")) // 5)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    num_programs=st.integers(1, 20),
    window=st.none() | st.integers(1, 300),
    has_sinks=st.booleans(),
)
def test_decode_equals_oracle_whatever_the_lengths_are(
    lengths: list[int], num_programs: int, window: int | None, has_sinks: bool
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = Shape(4, 2, 16, 16, 16, tuple((length - 1, 1) for length in lengths))
    sinks = torch.linspace(-2, 9, 4).to(device) if has_sinks else None
    options = AttentionOptions(scale=0.3, sliding_window=window, sinks=sinks)
    problem = make_problem(shape, device)
    assert_close(_decode(problem, options, num_programs), attend_by_oracle(problem, options))


def test_decode_leaves_other_tokens_alone_when_prompts_follow(device: torch.device) -> None:
    problem = make_problem(Shape(4, 2, 32, 32, 16, ((200, 1), (33, 1), (9, 6))), device)
    options, output = AttentionOptions(scale=0.3), _empty_output(problem)
    pools = LayerPools(problem.key_pool, problem.value_pool)
    paged_decode(problem.query, pools, problem.batch, options, output, num_rows=2, num_programs=3)
    assert_close(output[:2], attend_by_oracle(problem, options)[:2])
    assert bool(output[2:].isnan().all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_decode_follows_the_batch_when_a_graph_replays_it(device: torch.device) -> None:
    shape = Shape(8, 2, 64, 64, 16, ((900, 1), (40, 1)))
    problem, options = make_problem(shape, device, torch.bfloat16), AttentionOptions(scale=0.1)
    _decode(problem, options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = _decode(problem, options)
    for computed in ((900, 40), (17, 3), (511, 0)):
        problem.batch.num_computed_tokens.copy_(torch.tensor(computed))
        graph.replay()
        assert_close(output, attend_by_oracle(problem, options))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a pool of some GiB")
def test_decode_finds_its_blocks_when_offsets_exceed_32_bits(device: torch.device) -> None:
    shape = Shape(2, 1, 32, 32, 16, ((20, 1),))
    problem, options = make_problem(shape, device, torch.bfloat16), AttentionOptions(scale=0.1)
    expected = attend_by_oracle(problem, options)
    num_blocks = problem.key_pool.shape[0]
    storage = torch.zeros(num_blocks, 2**30, dtype=torch.bfloat16, device=device)
    pools = [storage[:, start : start + 512].view(num_blocks, 16, 1, 32) for start in (0, 512)]
    pools[0].copy_(problem.key_pool)
    pools[1].copy_(problem.value_pool)
    assert_close(_decode(problem.with_pools(*pools), options, 2), expected)
