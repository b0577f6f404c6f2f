"""Split decode attention against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from splitserve_kernels.gpu.attention.splits import MAX_NUM_SPLITS, choose_num_splits
from splitserve_kernels.gpu.layer_pools import KVScales, LayerPools
from splitserve_kernels.paged_batch import AttentionOptions, build_paged_batch
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

SHAPES = (
    Shape(1, 1, 32, 32, 1, ((0, 1),)),
    Shape(64, 2, 64, 64, 16, ((15, 1), (129, 1))),
    Shape(3, 3, 80, 80, 8, ((63, 1), (64, 1))),
    Shape(6, 2, 96, 40, 3, ((70, 1), (4, 1))),
    Shape(71, 1, 64, 64, 32, ((100, 1),)),
    Shape(4, 2, 128, 128, 256, ((299, 1), (7, 1))),
    Shape(4, 1, 256, 256, 16, ((65, 1),)),
)
PLAIN = Shape(8, 2, 32, 32, 16, ((0, 1), (15, 1), (16, 1), (129, 1)))
# Rows without tokens may stand between others.
GAPS = Shape(4, 2, 32, 32, 8, ((9, 0), (0, 1), (70, 1), (20, 0), (30, 1), (5, 0)))


def _decode(
    problem: Problem, options: AttentionOptions, num_splits: int | None = None
) -> torch.Tensor:
    pools = LayerPools(problem.key_pool, problem.value_pool)
    return paged_decode(problem.query, pools, problem.batch, options, num_splits)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_equals_oracle_when_shapes_are_odd(
    shape: Shape, num_splits: int, device: torch.device
) -> None:
    problem, options = make_problem(shape, device), AttentionOptions(scale=0.3)
    assert_close(_decode(problem, options, num_splits), attend_by_oracle(problem, options))


@pytest.mark.parametrize("num_splits", [1, 2, 16])
def test_decode_equals_oracle_when_rows_have_no_tokens(
    num_splits: int, device: torch.device
) -> None:
    problem, options = make_problem(GAPS, device), AttentionOptions(scale=0.3)
    assert_close(_decode(problem, options, num_splits), attend_by_oracle(problem, options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("shape", [PLAIN, SHAPES[2]])
def test_decode_equals_oracle_when_numbers_have_16_bits(
    shape: Shape, num_splits: int, dtype: torch.dtype, device: torch.device
) -> None:
    problem, options = make_problem(shape, device, dtype), AttentionOptions(scale=0.3)
    actual = _decode(problem, options, num_splits)
    assert actual.dtype == dtype
    assert_close(actual, attend_by_oracle(problem, options))


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("window", [1, 9, 64, 1000])
def test_decode_sees_the_window_alone_when_it_slides(
    window: int, num_splits: int, device: torch.device
) -> None:
    shape = Shape(4, 2, 32, 32, 8, ((100, 1), (0, 1), (63, 1), (64, 1)))
    options = AttentionOptions(scale=0.3, sliding_window=window)
    problem = make_problem(shape, device)
    expected = attend_by_oracle(problem, options)
    hide_what_is_behind(problem, shape, window)
    assert_close(_decode(problem, options, num_splits), expected)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_decode_equals_oracle_when_scores_are_capped(
    softcap: float, num_splits: int, device: torch.device
) -> None:
    problem, options = make_problem(PLAIN, device), AttentionOptions(0.3, softcap=softcap)
    assert_close(_decode(problem, options, num_splits), attend_by_oracle(problem, options))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_equals_oracle_when_heads_have_sinks(num_splits: int, device: torch.device) -> None:
    sinks = torch.linspace(-2, 9, PLAIN.num_heads).to(device)
    sinks[3] = -torch.inf
    options = AttentionOptions(scale=0.3, sliding_window=50, sinks=sinks)
    problem = make_problem(PLAIN, device)
    assert_close(_decode(problem, options, num_splits), attend_by_oracle(problem, options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_equals_oracle_when_pools_have_8_bits(
    num_splits: int, dtype: torch.dtype, device: torch.device
) -> None:
    problem, options = make_problem(SHAPES[2], device, dtype), AttentionOptions(scale=0.3)
    narrow = (
        problem.key_pool.to(torch.float8_e4m3fn),
        problem.value_pool.to(torch.float8_e4m3fn),
    )
    pools = LayerPools(*narrow, KVScales(key=0.7, value=1.6))
    actual = paged_decode(problem.query, pools, problem.batch, options, num_splits)
    wide = problem.with_pools(narrow[0].float() * 0.7, narrow[1].float() * 1.6)
    assert_close(actual, attend_by_oracle(wide, options))


def test_decode_computes_in_float32_when_pools_have_another_dtype(device: torch.device) -> None:
    problem, options = make_problem(SHAPES[2], device, torch.float16), AttentionOptions(scale=0.3)
    problem = replace(problem, query=problem.query.float())
    assert_close(_decode(problem, options, 2), attend_by_oracle(problem, options))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_says_nan_when_a_query_is_nan(num_splits: int, device: torch.device) -> None:
    problem = make_problem(PLAIN, device)
    problem.query[1, 5] = torch.nan
    actual = _decode(problem, AttentionOptions(scale=0.3), num_splits)
    is_nan = actual.isnan()
    assert bool(is_nan[1, 5].all())
    assert int(is_nan.sum()) == actual.shape[2]


def test_decode_returns_nothing_when_there_are_no_rows(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int32)
    batch = build_paged_batch(none.view(0, 0), none, none, 16, device)
    pool = torch.zeros(2, 16, 2, 32, device=device)
    query = torch.empty(0, 4, 32, device=device)
    output = paged_decode(query, LayerPools(pool, pool), batch, AttentionOptions(scale=1.0))
    assert output.shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("num_programs", "num_tokens", "num_multiprocessors", "expected"),
    [
        (1, 1, 132, 1),  # nothing to share
        (1, 511, 132, 1),
        (1, 512, 132, 2),
        (8, 100_000, 132, 32),  # one row, 8 heads: 256 of 264 programs
        (264, 100_000, 132, 1),  # full without
        (132, 100_000, 132, 2),
        (1, 1_000_000, 132, MAX_NUM_SPLITS),
        (8, 2048, 132, 8),  # 256 keys each
        (1, 100_000, 1, 2),
    ],
)
def test_choose_num_splits_fills_the_device_when_rows_are_few(
    num_programs: int, num_tokens: int, num_multiprocessors: int, expected: int
) -> None:
    assert choose_num_splits(num_programs, num_tokens, num_multiprocessors) == expected


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
