"""Native sampling against the sampler in plain torch: the same tokens, not merely alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_service.backends import native_draw
from executor_service.sampling import SamplingRows, draw_in_torch
from executor_service.steps import SamplingParams
from splitserve_kernels.cpu import NativeLibrary
from tests.support.steps.step_driver import make_sampling_rows

VOCAB_SIZES = (1, 7, 511, 512, 513, 3000)
SPOILT = (float("nan"), float("inf"), float("-inf"))


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.5, 100.0])),
        top_k=draw(st.sampled_from([None, None, 1, 2, 40, 3000, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, SamplingRows]:
    """Logits, many of them equal in some cases, and rows with any parameters."""
    params = draw(st.lists(sampling_params(), min_size=1, max_size=6))
    vocab_size = draw(st.sampled_from(VOCAB_SIZES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(len(params), vocab_size, generator=generator)
    logits *= draw(st.sampled_from([0.1, 1.0, 8.0]))
    if draw(st.booleans()):
        logits = logits.round()
    for row, token, number in draw(
        st.lists(
            st.tuples(
                st.integers(0, len(params) - 1),
                st.integers(0, vocab_size - 1),
                st.sampled_from(SPOILT),
            ),
            max_size=3,
        )
    ):
        logits[row, token] = number
    if draw(st.booleans()):
        logits[0, ::2] = -torch.inf
    return logits, make_rows(params, draw(st.integers(-(2**63), 2**63 - 10)))


def make_rows(params: list[SamplingParams], first_seed: int) -> SamplingRows:
    count = len(params)
    return make_sampling_rows(
        params, seeds=np.arange(first_seed, first_seed + count), positions=np.arange(count) * 1000
    )


@settings(max_examples=75)
@given(problem=problems())
def test_draw_chooses_what_torch_chooses_when_anything_is_asked(
    library: NativeLibrary, problem: tuple[Tensor, SamplingRows]
) -> None:
    logits, rows = problem
    expected = draw_in_torch(logits, rows)
    assert native_draw(library)(logits, rows).tolist() == expected.tolist()


def test_draw_follows_the_distribution_when_many_rows_are_drawn(library: NativeLibrary) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    count = 4000
    rows = make_rows([SamplingParams(temperature=1.0)] * count, 7)
    tokens = native_draw(library)(probabilities.log().expand(count, 4).contiguous(), rows)
    shares = np.bincount(tokens, minlength=4) / count
    # Five standard deviations of a share of one half.
    assert np.abs(shares - probabilities.numpy()).max() < 5 * 0.5 / count**0.5


@pytest.mark.parametrize("number", SPOILT)
def test_draw_is_invalid_when_no_token_can_be_told(library: NativeLibrary, number: float) -> None:
    logits = torch.full((2, 100), number)
    logits[1] = 0.0
    rows = make_rows([SamplingParams()] * 2, 1)
    assert (native_draw(library)(logits, rows) >= 0).tolist() == [False, True]


def test_draw_reads_rows_when_the_logits_are_a_slice(library: NativeLibrary) -> None:
    logits = torch.zeros(3, 200)
    logits[:, 150:] = 50.0
    logits[:, 42] = 9.0
    rows = make_rows([SamplingParams(temperature=0.0)] * 3, 1)
    assert native_draw(library)(logits[:, :100], rows).tolist() == [42] * 3
