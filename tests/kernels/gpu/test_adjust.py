"""Logits adjusted by the kernel against plain torch: the same bits, whatever rows ask for."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_service.device import HostStreams, Uploads, streams_of
from executor_service.sampling import SamplingRows, TokenCounts, adjust_in_torch, sample
from executor_service.steps import Grammar, SamplingParams, TokenMasks
from tests.support.steps.step_driver import make_sampling_rows

pytest.importorskip("triton", reason="triton is not installed")

from executor_service.backends.gpu_draw import triton_adjust
from executor_service.trials import try_adjust

NUM_PROMPT_TOKENS = 3
GRAMMAR = Grammar("regex", ("a",))
SIZES = st.sampled_from((1, 31, 32, 33, 1024, 1025, 2500))
PENALTIES = st.sampled_from((0.0, 0.3, -1.7, 2.0))


def _assert_same_bits(logits: Tensor, rows: SamplingRows) -> None:
    before, device = logits.clone(), logits.device
    uploads = Uploads(device, streams_of(device))
    counts = TokenCounts(logits.shape[1], device, uploads)
    rows = rows.with_counts(counts, np.arange(len(rows.params), dtype=np.int32))
    expected = adjust_in_torch(logits, rows, uploads)
    adjusted = triton_adjust(logits, rows, uploads)
    assert torch.equal(adjusted.view(torch.int32), expected.contiguous().view(torch.int32))
    assert torch.equal(logits, before)


def _rows(
    params: list[SamplingParams], histories: list[list[int]], masks: TokenMasks | None = None
) -> SamplingRows:
    positions = [len(history) for history in histories]
    return make_sampling_rows(
        params,
        positions=positions,
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        histories=histories,
        masks=masks,
    )


@st.composite
def _params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    tokens = st.integers(0, vocab_size - 1)
    some = st.lists(tokens, max_size=4)
    # What a request may not have together with others.
    rules = draw(st.sampled_from(("none", "grammar", "suppressed", "words")))
    return SamplingParams(
        repetition_penalty=draw(st.sampled_from((1.0, 1.3, 0.7))),
        frequency_penalty=draw(PENALTIES),
        presence_penalty=draw(PENALTIES),
        logit_bias=draw(
            st.dictionaries(tokens, st.sampled_from((-math.inf, -0.7, 0.0, 3.3)), max_size=40)
        ),
        min_tokens=draw(st.integers(0, 6)) if rules == "suppressed" else 0,
        suppressed_token_ids=tuple(draw(some)) if rules == "suppressed" else (),
        allowed_token_ids=tuple(draw(some)) if rules != "suppressed" else (),
        bad_words_token_ids=tuple(
            tuple(word)
            for word in draw(st.lists(st.lists(tokens, min_size=1, max_size=2), max_size=4))
        )
        if rules == "words"
        else (),
        grammar=GRAMMAR if rules == "grammar" else None,
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, SamplingRows]:
    vocab_size = draw(SIZES)
    params = draw(st.lists(_params(vocab_size), min_size=1, max_size=5))
    # Few tokens, so that they occur often.
    token = st.integers(max(0, vocab_size - 3), vocab_size - 1)
    histories = [draw(st.lists(token, min_size=NUM_PROMPT_TOKENS, max_size=10)) for _ in params]
    masked = np.array([row for row, p in enumerate(params) if p.grammar is not None], np.int64)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    # As grammars make them, words may be more than the vocabulary needs.
    shape = (len(masked), -(-vocab_size // 32) + draw(st.integers(0, 2)))
    words = random.integers(-(2**31), 2**31, shape).astype(np.int32)
    logits = torch.from_numpy(random.normal(0, 3, (len(params), vocab_size + 5)).astype(np.float32))
    logits[random.random(logits.shape) < 0.05] = 0.0
    logits[random.random(logits.shape) < 0.05] = -torch.inf
    # Rows do not lie next to each other.
    return logits[:, :-5], _rows(params, histories, TokenMasks(masked, words, (), {}))


@settings(max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "60")), deadline=None)
@given(problem=problems())
def test_adjust_gives_the_same_bits_when_rows_ask_for_anything(
    problem: tuple[Tensor, SamplingRows], device: torch.device
) -> None:
    logits, rows = problem
    _assert_same_bits(logits.to(device), rows)


def test_adjust_counts_large_numbers_when_a_token_comes_often(device: torch.device) -> None:
    params = SamplingParams(frequency_penalty=0.1, presence_penalty=0.1, repetition_penalty=1.1)
    history = [0] * 3000 + [5] * 17
    _assert_same_bits(torch.linspace(-9, 9, 40, device=device)[None], _rows([params], [history]))


def test_adjust_finds_each_bias_when_there_are_many(device: torch.device) -> None:
    vocab_size = 5000
    # All of one block, none of another, one in each of the others.
    biased = [*range(1024, 2048), 0, 3072, 4999]
    params = [
        SamplingParams(logit_bias={token: 0.01 * token for token in biased}),
        SamplingParams(),
        SamplingParams(logit_bias={7: 1.5}),
    ]
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0))
    _assert_same_bits(logits.to(device), _rows(params, [[1, 2, 3]] * 3))


def test_adjust_passes_logits_on_when_no_row_asks_for_anything_now(device: torch.device) -> None:
    logits = torch.zeros(1, 9, device=device)
    rows = _rows([SamplingParams(min_tokens=1, suppressed_token_ids=(3,))], [[1, 2, 3, 4]])
    assert triton_adjust(logits, rows, Uploads(device, streams_of(device))) is logits


def test_adjust_sends_all_it_needs_in_one_copy(device: torch.device) -> None:
    sizes: list[int] = []

    class _Pinned(HostStreams):
        @property
        def shares_memory(self) -> bool:
            return False

        def copy_to_device(self, source: Tensor, target: Tensor) -> None:
            sizes.append(len(source))
            super().copy_to_device(source, target)

    words = np.full((2, 1000), -1, np.int32)
    masks = TokenMasks(np.array([0, 2]), words, (), {})
    rows = _rows(
        [SamplingParams(grammar=GRAMMAR), SamplingParams(logit_bias={3: 1.0}), SamplingParams()],
        [[1, 2, 3]] * 3,
        masks,
    )
    logits = torch.zeros(3, 9, device=device)
    adjusted = triton_adjust(logits, rows, Uploads(device, _Pinned()))
    assert adjusted.tolist() == [[0.0] * 9, [0.0, 0.0, 0.0, 1.0] + [0.0] * 5, [0.0] * 9]
    assert len(sizes) == 1
    assert sizes[0] >= words.nbytes


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sample_chooses_the_same_tokens_when_the_kernel_adjusts(
    temperature: float, device: torch.device
) -> None:
    params = [
        SamplingParams(temperature=temperature, repetition_penalty=1.4, logit_bias={2: 2.0}),
        SamplingParams(temperature=temperature, frequency_penalty=0.9),
        SamplingParams(temperature=temperature),
    ]
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1)).to(device)
    logits[2, 4] = torch.nan
    rows = _rows(params, [[1, 2, 3, 3]] * 3)
    expected = sample(logits, rows).tolist()
    assert sample(logits, rows, adjust=triton_adjust).tolist() == expected
    assert expected[2] == -1


@pytest.mark.parametrize("vocab_size", [3, 700, 2049])
def test_try_adjust_passes(vocab_size: int, device: torch.device) -> None:
    try_adjust(triton_adjust, vocab_size, device)
