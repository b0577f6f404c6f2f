"""Attention of the GPU kernels against the oracle.

Decodes, their keys shared among any number of programs; prompts, whole (a program to a tile of
queries) and split (programs share the keys), with rows of one new token or none mixed in.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from tests.kernels.problems import (
    Problem,
    Shape,
    assert_close,
    attend_by_oracle,
    hide_what_is_behind,
    make_problem,
)
from tests.support.covering import covering

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.attention import backend
from splitserve_kernels.gpu.attention.backend import paged_prefill
from splitserve_kernels.gpu.attention.paged_decode import paged_decode, paged_split_prefill
from splitserve_kernels.gpu.attention.tile_sizes import TileSizes, prefill_tile_sizes

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
PLAIN = AttentionOptions(scale=0.3)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to attend. `num_programs`: how many share the keys; None: prompts as a whole.

    `overlaps`: these as on Hopper.
    """

    is_decode: bool
    num_programs: int | None
    overlaps: bool = False

    def attend(
        self,
        problem: Problem,
        options: AttentionOptions = PLAIN,
        scales: KVScales = UNIT_SCALES,
        *,
        first_row: int = 0,
        num_rows: int | None = None,
    ) -> torch.Tensor:
        """[T, H, E]; decodes are the rows before `num_rows`, prompts those from `first_row` on."""
        pools = LayerPools(problem.key_pool, problem.value_pool, scales)
        num_tokens, num_heads, _ = problem.query.shape
        # NaN: all is to be written.
        shape = (num_tokens, num_heads, problem.value_pool.shape[3])
        output = problem.query.new_full(shape, torch.nan)
        known = (problem.query, pools, problem.batch, options, output)
        if self.is_decode:
            num_rows = problem.batch.num_rows if num_rows is None else num_rows
            paged_decode(*known, num_rows=num_rows, num_programs=self.num_programs)
        elif self.num_programs is None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backend, "prefill_tile_sizes", self._sizes)
                paged_prefill(*known, first_row=first_row)
        else:
            paged_split_prefill(*known, first_row=first_row, num_programs=self.num_programs)
        return output

    def _sizes(self, *arguments: Any) -> TileSizes:  # noqa: ANN401
        return replace(prefill_tile_sizes(*arguments), overlaps=self.overlaps)


def decode(num_programs: int | None = None) -> Kernel:
    return Kernel(True, num_programs)


def prefill(num_programs: int | None) -> Kernel:
    return Kernel(False, num_programs)


DECODES = (decode(1), decode(5))
OVERLAPPED = Kernel(False, None, overlaps=True)
PREFILLS = (prefill(None), OVERLAPPED, prefill(1), prefill(5))


@dataclass(frozen=True, slots=True)
class Case:
    """`has_sinks`: each head has one; `has_8_bits`: pools are float8, with scales."""

    kernel: Kernel
    shape: Shape
    options: AttentionOptions = PLAIN
    dtype: torch.dtype = FLOAT32
    has_sinks: bool = False
    has_8_bits: bool = False


def _check(case: Case, device: torch.device) -> None:
    """Attends as the oracle does, and reads nothing behind a window."""
    problem, options = make_problem(case.shape, device, case.dtype), case.options
    if case.has_sinks:
        sinks = torch.linspace(-2, 9, case.shape.num_heads).to(device)
        sinks[3] = -torch.inf
        options = replace(options, sinks=sinks)
    scales = KVScales(key=0.7, value=1.6) if case.has_8_bits else UNIT_SCALES
    wide = problem
    if case.has_8_bits:
        pools = (problem.key_pool, problem.value_pool)
        problem = problem.with_pools(*(pool.to(torch.float8_e4m3fn) for pool in pools))
        key, value = problem.key_pool.float(), problem.value_pool.float()
        wide = problem.with_pools(key * scales.key, value * scales.value)
    expected = attend_by_oracle(wide, options)
    if options.sliding_window is not None and not case.has_sinks:
        hide_what_is_behind(problem, case.shape, options.sliding_window)
    actual = case.kernel.attend(problem, options, scales)
    assert actual.dtype == case.dtype
    assert_close(actual, expected)


# -- Decodes ---------------------------------------------------------------------------------------

DECODE_SHAPES = (
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
PLAIN_DECODES = Shape(8, 2, 32, 32, 16, ((0, 1), (15, 1), (16, 1), (129, 1)))
WINDOWED_DECODES = Shape(4, 2, 32, 32, 8, ((100, 1), (0, 1), (63, 1), (64, 1)))
# Rows without tokens may stand between others.
GAPS = Shape(4, 2, 32, 32, 8, ((9, 0), (0, 1), (70, 1), (20, 0), (30, 1), (5, 0)))
# Of tiles of 64 keys: rows that are one program's, whose first or last keys are, and all between.
UNEVEN_DECODES = Shape(2, 1, 16, 16, 16, (*(((70, 1),) * 5), (1500, 1), (0, 1), *(((63, 1),) * 4)))
# The kernel looks at 512 rows at a time.
HUNDREDS = Shape(
    1, 1, 16, 16, 16, (*(((9, 0),) * 510), (100, 1), (70, 1), (300, 1), (5, 1), (64, 1))
)


@pytest.mark.cases(24)
@pytest.mark.parametrize(
    "case",
    [
        *(Case(kernel, shape) for kernel in DECODES for shape in DECODE_SHAPES),
        *(Case(decode(number), GAPS) for number in (1, 2, 16)),
        *(
            Case(kernel, shape, dtype=dtype)
            for kernel in DECODES
            for shape in (PLAIN_DECODES, DECODE_SHAPES[2])
            for dtype in (FLOAT16, BFLOAT16)
        ),
        *(
            Case(kernel, WINDOWED_DECODES, AttentionOptions(scale=0.3, sliding_window=window))
            for kernel in DECODES
            for window in (1, 9, 64, 1000)
        ),
        *(
            Case(kernel, PLAIN_DECODES, AttentionOptions(0.3, softcap=softcap))
            for kernel in DECODES
            for softcap in (0.5, 30.0)
        ),
        *(
            Case(kernel, PLAIN_DECODES, AttentionOptions(0.3, sliding_window=50), has_sinks=True)
            for kernel in DECODES
        ),
        *(
            Case(kernel, DECODE_SHAPES[2], dtype=dtype, has_8_bits=True)
            for kernel in DECODES
            for dtype in (FLOAT32, BFLOAT16)
        ),
        *(Case(decode(number), UNEVEN_DECODES) for number in (2, 7, 29, 80)),
        Case(decode(3), HUNDREDS),
    ],
)
def test_decode_equals_oracle(case: Case, device: torch.device) -> None:
    _check(case, device)


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
    options = AttentionOptions(scale=0.3, sliding_window=window)
    _check(Case(decode(num_programs), shape, options, has_sinks=has_sinks), device)


def test_decode_computes_in_float32_when_pools_have_another_dtype(device: torch.device) -> None:
    problem = make_problem(DECODE_SHAPES[2], device, FLOAT16)
    problem = replace(problem, query=problem.query.float())
    assert_close(decode(2).attend(problem), attend_by_oracle(problem, PLAIN))


def test_decode_leaves_other_tokens_alone_when_prompts_follow(device: torch.device) -> None:
    problem = make_problem(Shape(4, 2, 32, 32, 16, ((200, 1), (33, 1), (9, 6))), device)
    output = decode(3).attend(problem, num_rows=2)
    assert_close(output[:2], attend_by_oracle(problem, PLAIN)[:2])
    assert bool(output[2:].isnan().all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_decode_follows_the_batch_when_a_graph_replays_it(device: torch.device) -> None:
    shape = Shape(8, 2, 64, 64, 16, ((900, 1), (40, 1)))
    problem = make_problem(shape, device, BFLOAT16)
    decode().attend(problem)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = decode().attend(problem)
    for computed in ((900, 40), (17, 3), (511, 0)):
        problem.batch.num_computed_tokens.copy_(torch.tensor(computed))
        graph.replay()
        assert_close(output, attend_by_oracle(problem, PLAIN))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a pool of some GiB")
def test_decode_finds_its_blocks_when_offsets_exceed_32_bits(device: torch.device) -> None:
    problem = make_problem(Shape(2, 1, 32, 32, 16, ((20, 1),)), device, BFLOAT16)
    expected = attend_by_oracle(problem, PLAIN)
    num_blocks = problem.key_pool.shape[0]
    storage = torch.zeros(num_blocks, 2**30, dtype=BFLOAT16, device=device)
    pools = [storage[:, start : start + 512].view(num_blocks, 16, 1, 32) for start in (0, 512)]
    pools[0].copy_(problem.key_pool)
    pools[1].copy_(problem.value_pool)
    assert_close(decode(2).attend(problem.with_pools(*pools)), expected)


# -- Prompts ---------------------------------------------------------------------------------------

PROMPT_SHAPES = (
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
MANY_TILES = Shape(2, 1, 32, 32, 16, ((40, 3), (100, 200)))
MANY_ROWS = Shape(
    1, 1, 32, 32, 16, tuple((row % 5, 40 if row == 129 else 1 + row % 2) for row in range(132))
)
# Of tiles of 64 keys and of few queries: rows that are one program's, whose first or last keys are,
# and all between; prompts of several tiles of queries.
UNEVEN_PROMPTS = Shape(2, 1, 16, 16, 16, ((900, 9), *(((70, 3),) * 4), (0, 90), (5, 0), (300, 70)))
# Tiles that end with one or two tokens, whose window begins or ends in another tile of keys.
SEAMS = Shape(2, 1, 16, 16, 16, tuple((400 - new, new) for new in (2, 33, 34, 66, 130)))
# A turn of a chat.
FAR_ON = Shape(4, 1, 16, 16, 16, ((6000, 20), (5, 2)))


def _pairs(**options: Sequence[object]) -> list[Case]:
    """Cases in which every two of `options` take every pair of their values."""
    return [Case(**case) for case in covering(options, strength=2)]  # type: ignore[arg-type]


def _windows(*sizes: int | None) -> list[AttentionOptions]:
    return [AttentionOptions(scale=0.3, sliding_window=size) for size in sizes]


@pytest.mark.cases(18)
@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(kernel, shape)
            for kernel in PREFILLS
            for shape in (*PROMPT_SHAPES, MIXED, MANY_TILES, MANY_ROWS)
        ),
        *_pairs(
            kernel=PREFILLS,
            shape=(PROMPT_SHAPES[2], PROMPT_SHAPES[6], MIXED),
            dtype=(FLOAT16, BFLOAT16),
        ),
        *_pairs(kernel=PREFILLS, shape=(PROMPT_SHAPES[2], MIXED), options=_windows(2, 9, 64, 1000)),
        *(
            Case(prefill(number), SEAMS, options)
            for number in (None, 7)
            for options in _windows(65, 200)
        ),
        *(Case(OVERLAPPED, SEAMS, options) for options in _windows(65, 200)),
        *(
            Case(kernel, MIXED, AttentionOptions(0.3, softcap=softcap))
            for kernel in PREFILLS
            for softcap in (0.5, 30.0)
        ),
        *(
            Case(kernel, MIXED, options, has_sinks=True)
            for kernel in PREFILLS
            for options in _windows(None, 20)
        ),
        *(
            Case(kernel, PROMPT_SHAPES[2], dtype=dtype, has_8_bits=True)
            for kernel in PREFILLS
            for dtype in (FLOAT32, BFLOAT16)
        ),
        *(
            Case(prefill(number), UNEVEN_PROMPTS, options)
            for number in (2, 7, 80)
            for options in _windows(None, 100)
        ),
        *(Case(prefill(7), FAR_ON, dtype=dtype) for dtype in (FLOAT32, BFLOAT16)),
    ],
)
def test_prefill_equals_oracle(case: Case, device: torch.device) -> None:
    _check(case, device)


@settings(max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "25")) // 5)
@given(
    rows=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=4),
    num_programs=st.integers(1, 20),
    window=st.none() | st.integers(1, 300),
    has_sinks=st.booleans(),
)
def test_split_prefill_equals_oracle_whatever_the_lengths_are(
    rows: list[tuple[int, int]], num_programs: int, window: int | None, has_sinks: bool
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = AttentionOptions(scale=0.3, sliding_window=window)
    shape = Shape(4, 2, 16, 16, 16, tuple(rows))
    _check(Case(prefill(num_programs), shape, options, has_sinks=has_sinks), device)


@pytest.mark.parametrize("kernel", PREFILLS)
@pytest.mark.parametrize("first_row", [1, 3])
def test_prefill_leaves_decodes_alone_when_they_come_first(
    first_row: int, kernel: Kernel, device: torch.device
) -> None:
    rows = ((20, 1), (0, 1), (9, 1), (33, 70), (100, 1), (70, 0), (5, 3))
    problem = make_problem(Shape(4, 1, 32, 32, 16, rows), device)
    output = kernel.attend(problem, first_row=first_row)
    assert bool(output[:first_row].isnan().all())
    assert_close(output[first_row:], attend_by_oracle(problem, PLAIN)[first_row:])


# -- Both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [*DECODES, *PREFILLS])
def test_attention_returns_nothing_when_there_are_no_rows(
    kernel: Kernel, device: torch.device
) -> None:
    none = torch.empty(0, dtype=torch.int32)
    batch = build_paged_batch(none.view(0, 0), none, none, 16, device)
    pool = torch.zeros(2, 16, 2, 32, device=device)
    query = torch.empty(0, 4, 32, device=device)
    assert kernel.attend(Problem(query, pool, pool, batch)).shape == (0, 4, 32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("kernel", "shape"),
    [*((each, PLAIN_DECODES) for each in DECODES), (prefill(1), MIXED), (prefill(5), MIXED)],
)
def test_attention_is_nan_for_one_query_when_that_is(
    kernel: Kernel, shape: Shape, device: torch.device
) -> None:
    problem = make_problem(shape, device)
    problem.query[1, 5] = torch.nan
    is_nan = kernel.attend(problem).isnan()
    assert bool(is_nan[1, 5].all())
    assert int(is_nan.sum()) == problem.value_pool.shape[3]
