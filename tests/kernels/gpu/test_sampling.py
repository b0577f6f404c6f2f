"""Tokens chosen by the kernels against the executor's sampler in plain torch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_service.sampling import SamplingRows, draw_in_torch, draw_rows, sample, uniform
from executor_service.steps import SamplingParams
from tests.support.steps.step_driver import make_sampling_rows

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from executor_service.backends.gpu_draw import triton_draw
from splitserve_kernels.gpu import philox
from splitserve_kernels.gpu.sampling.draw import DrawColumns, draw, greedy, num_words, pack

pytestmark = pytest.mark.cases(6)

# Of a program: a block of the vocabulary.
BLOCK = 4096
SEEDS = (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**63), 123456789012345)


def _logits(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Rows do not lie next to each other."""
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(num_rows, vocab_size + 5, generator=generator).to(device)[:, :-5] * 2


def _rows(params: list[SamplingParams], first_seed: int = 7) -> SamplingRows:
    count = len(params)
    return make_sampling_rows(
        params, seeds=np.arange(first_seed, first_seed + count), positions=np.arange(count) * 13
    )


def _columns(rows: SamplingRows, logits: Tensor) -> DrawColumns:
    words = np.empty(num_words(len(logits)), np.int64)
    pack(draw_rows(rows, logits.shape[1]), words)
    return DrawColumns.of_words(torch.from_numpy(words).to(logits.device))


def _assert_equals_oracle(logits: Tensor, rows: SamplingRows, max_listed: int = 16384) -> None:
    before = logits.clone()
    expected = draw_in_torch(logits.cpu(), rows)
    token_ids = draw(logits, _columns(rows, logits), max_listed=max_listed)
    assert token_ids.tolist() == expected.tolist()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


@triton.jit  # type: ignore[untyped-decorator]
def _uniform_kernel(seeds: tl.tensor, positions: tl.tensor, output: tl.tensor) -> None:
    row = tl.program_id(0)
    tl.store(output + row, philox.uniform(tl.load(seeds + row), tl.load(positions + row)))


def test_uniform_equals_the_executors_when_seeds_are_extreme(device: torch.device) -> None:
    positions = (0, 1, 77, 2**31, 2**32 + 5)
    pairs = torch.tensor([(seed, position) for seed in SEEDS for position in positions])
    seeds, where = (column.contiguous().to(device) for column in pairs.unbind(-1))
    output = torch.empty(len(pairs), dtype=torch.float64, device=device)
    _uniform_kernel[(len(pairs),)](seeds, where, output)
    assert torch.equal(output, uniform(seeds, where))


@pytest.mark.parametrize("vocab_size", [1, 5, 701, 4096, 9001])
def test_greedy_equals_the_executors_when_vocabularies_are_odd(
    vocab_size: int, device: torch.device
) -> None:
    logits = _logits(6, vocab_size, device)
    assert greedy(logits).tolist() == logits.argmax(dim=-1).tolist()


def test_greedy_takes_the_smallest_id_when_logits_tie(device: torch.device) -> None:
    logits = torch.zeros(4, 9001, device=device)
    logits[1, [8000, 17, 300]] = 5.0
    logits[2, :] = -1.0
    logits[2, [4097, 8192, 4096]] = -0.0
    logits[3, 100:] = -torch.inf
    assert greedy(logits).tolist() == [0, 17, 4096, 0]


def _broken_logits(device: torch.device) -> Tensor:
    logits = _logits(8, 5000, device)
    logits[1, 4999] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[4] = torch.nan
    logits[5, 1:] = -torch.inf
    logits[6, 7], logits[6, 4500] = torch.inf, torch.nan
    logits[7, 3] = -torch.inf
    return logits


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01),
    ],
)
def test_draw_marks_the_row_when_no_token_can_be_told(
    params: SamplingParams, device: torch.device
) -> None:
    logits = _broken_logits(device)
    _assert_equals_oracle(logits, _rows([params] * 8))
    is_valid = greedy(logits) >= 0
    assert is_valid.tolist() == [True, False, False, False, False, True, False, True]


@pytest.mark.parametrize("vocab_size", [1, 701, 9001])
def test_draw_equals_the_executors_when_temperatures_differ(
    vocab_size: int, device: torch.device
) -> None:
    params = [SamplingParams(temperature=t) for t in (0.0, 0.3, 1.0, 1e-30, 5.0)] * 5
    rows = _rows(params)
    # All 64 bits matter.
    seeds = rows.seeds * 0x123456789ABCDEF
    _assert_equals_oracle(_logits(25, vocab_size, device), replace(rows, seeds=seeds))


def test_draw_takes_no_token_without_weight_when_most_have_none(device: torch.device) -> None:
    logits = torch.full((9, 9001), -torch.inf, device=device)
    logits[:, [3, 4095, 8500]] = torch.tensor([0.1, 0.7, -0.4], device=device)
    params = [SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.999)]
    _assert_equals_oracle(logits, _rows(params * 3))


def test_draw_is_the_same_when_nothing_is_said_to_be_cut(device: torch.device) -> None:
    logits = _logits(8, 9001, device)
    rows = _rows([SamplingParams(temperature=0.9), SamplingParams(min_p=0.05)] * 4)
    columns = _columns(rows, logits)
    token_ids = draw(logits, columns, may_cut=False).tolist()
    assert token_ids == draw(logits, columns).tolist() == draw_in_torch(logits, rows).tolist()


def test_choices_are_empty_when_there_are_no_rows(device: torch.device) -> None:
    none = torch.empty(0, 9, device=device)
    assert greedy(none).shape == draw(none, _columns(_rows([]), none)).shape == (0,)


LIMITS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.5, 1e3]),
    top_k=st.sampled_from([None, None, 1, 2, 40, 650, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-30, 0.05, 0.5, 1.0]),
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, SamplingRows]:
    """Logits, many of them equal in some cases, and rows with any limits."""
    params = draw(st.lists(LIMITS, min_size=1, max_size=4))
    vocab_size = draw(st.sampled_from((1, 7, 701, BLOCK, BLOCK + 1, 2 * BLOCK + 77)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(len(params), vocab_size, generator=generator)
    logits *= draw(st.sampled_from([0.0, 0.1, 1.0, 8.0]))
    if draw(st.booleans()):
        logits = logits.round()
    if draw(st.booleans()):
        logits[0, ::2] = -torch.inf
    spoilt = st.sampled_from([float("nan"), float("inf"), float("-inf")])
    places = st.tuples(st.integers(0, len(params) - 1), st.integers(0, vocab_size - 1), spoilt)
    for row, token, number in draw(st.lists(places, max_size=2)):
        logits[row, token] = number
    return logits, _rows(params, draw(st.integers(-(2**63), 2**63 - 10)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=30)
@given(problem=problems(), max_listed=st.sampled_from([128, 16384]))
def test_draw_chooses_what_torch_chooses_when_anything_is_asked(
    problem: tuple[Tensor, SamplingRows], max_listed: int, device: torch.device
) -> None:
    logits, rows = problem
    _assert_equals_oracle(logits.to(device), rows, max_listed)


@pytest.mark.parametrize("max_listed", [64, 16384])
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        # 600 tokens are as probable as the best, and as many half as probable.
        (SamplingParams(top_k=601), 1200),
        (SamplingParams(top_k=600), 600),
        (SamplingParams(top_k=1), 600),
        (SamplingParams(top_p=0.25), 225),
        (SamplingParams(top_p=0.75), 750),
        (SamplingParams(top_p=0.5, top_k=600), 300),
        (SamplingParams(top_p=0.75, min_p=0.6), 600),
    ],
)
def test_draw_keeps_the_smaller_ids_when_equals_are_cut(
    params: SamplingParams, kept: int, max_listed: int, device: torch.device
) -> None:
    logits = torch.full((1, 2 * BLOCK), -40.0, device=device)
    order = torch.randperm(2 * BLOCK, generator=torch.Generator().manual_seed(1)).to(device)
    best, second = order[:600].sort().values, order[600:1200].sort().values
    logits[0, best], logits[0, second] = 1.0, 1.0 - torch.log(torch.tensor(2.0)).item()
    eligible = torch.cat([best, second])[:kept]
    largest_kept = int(eligible.max())
    rows = _rows([params])
    # So near to 1 that only the last token is left.
    nearly = replace(rows, seeds=np.array([_seed_of_largest_u()], np.int64))
    token_ids = draw(logits, _columns(nearly, logits), max_listed=max_listed)
    assert token_ids.tolist() == [largest_kept] == draw_in_torch(logits.cpu(), nearly).tolist()


def _seed_of_largest_u() -> int:
    """Of many seeds that whose u at position 0 is closest to 1."""
    seeds = torch.arange(100_000)
    return int(uniform(seeds, torch.zeros_like(seeds)).argmax())


GREEDY, RANDOM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)
CUT = (
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=0.7, top_p=0.5),
    SamplingParams(temperature=1.3, min_p=0.2),
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "params", [(GREEDY,), (RANDOM,), CUT, (GREEDY, RANDOM, *CUT), (CUT[0], GREEDY)]
)
def test_triton_draw_chooses_what_torch_does_when_rows_differ(
    params: tuple[SamplingParams, ...], device: torch.device
) -> None:
    rows = _rows([params[row % len(params)] for row in range(8)])
    logits = _broken_logits(device)
    token_ids = triton_draw(logits, rows)
    assert token_ids.dtype == torch.int32
    assert token_ids.tolist() == draw_in_torch(logits.cpu(), rows).tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sample_chooses_the_same_when_biases_hide_what_is_wrong(device: torch.device) -> None:
    hiding = SamplingParams(temperature=0.8, logit_bias={0: -math.inf, 4999: -math.inf})
    rows, logits = _rows([hiding, GREEDY] * 4), _broken_logits(device)
    expected = sample(logits, rows).tolist()
    assert sample(logits, rows, triton_draw).tolist() == expected
    assert expected[1] == expected[2] == -1
