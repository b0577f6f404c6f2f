"""What every step of sampling makes of logits, against the processors of `transformers`.

Which of equal logits stay at the cut of top-p is not defined there, so that is compared by value.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from executor_service.sampling import TokenCounts, adjust_logits, truncate
from executor_service.steps import ParamRows, SamplingParams
from tests.support.steps.step_driver import make_sampling_rows

VOCAB_SIZE = 613
NUM_ROWS = 6
EOS = (3, 7)
WARPERS = tuple(
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in product(
        [1.0, 0.31, 7.0], [None, 1, 17, 400], [1.0, 0.83, 0.27, 1e-4], [0.0, 0.04, 0.6]
    )
)


def random_logits(num_rows: int, *, has_ties: bool) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 2
    # As bfloat16 makes them, only more so.
    return (logits * 2).round() / 2 if has_ties else logits


def process(processors: Any, histories: list[list[int]], logits: Tensor) -> Tensor:  # noqa: ANN401
    processed: Tensor = processors(torch.tensor(histories), logits)
    return processed


def hf_warpers(params: SamplingParams) -> LogitsProcessorList:
    """Those that `generate` makes of them, in its order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k is not None:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers


@pytest.mark.parametrize("has_ties", [False, True])
def test_truncation_keeps_what_hugging_face_keeps_when_limits_are_combined(
    has_ties: bool,
) -> None:
    logits = random_logits(NUM_ROWS, has_ties=has_ties)
    for params in WARPERS:
        expected = process(hf_warpers(params), [[0]] * NUM_ROWS, logits)
        shifted = (logits - logits.amax(dim=-1, keepdim=True)) / params.temperature
        kept = truncate(shifted, ParamRows.of([params] * NUM_ROWS)) > 0
        for row in range(NUM_ROWS):
            found = logits[row, kept[row]].sort().values
            survivors = logits[row, expected[row] > -torch.inf].sort().values
            assert found.tolist() == survivors.tolist(), params


PROCESSORS = (
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.4),
    SamplingParams(min_tokens=4, suppressed_token_ids=EOS),
    SamplingParams(logit_bias={5: 2.5, 600: -30.0}),
    SamplingParams(logit_bias={5: -math.inf, 600: -math.inf}),
    SamplingParams(allowed_token_ids=(8, 612, 0, 50)),
    SamplingParams(bad_words_token_ids=((9,), (612,))),
    # The prompt counts as well, and so does a sequence longer than all tokens.
    SamplingParams(
        bad_words_token_ids=((1, 2), (1, 2, 1), (2, 1, 5), (0, 1, 2, 6), (1,) * 40 + (4,), (2, 2))
    ),
)


def hf_processors(params: SamplingParams, prompt_len: int) -> LogitsProcessorList:
    """Those that `generate` makes of them, in its order."""
    processors = LogitsProcessorList()
    if params.logit_bias:
        bias: list[Any] = [[[token], value] for token, value in params.logit_bias.items()]
        processors.append(SequenceBiasLogitsProcessor(bias))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_words_token_ids:
        words = [list(tokens) for tokens in params.bad_words_token_ids]
        processors.append(NoBadWordsLogitsProcessor(words, eos_token_id=list(EOS)))
    if params.min_tokens:
        processors.append(
            MinNewTokensLengthLogitsProcessor(prompt_len, params.min_tokens, list(EOS))
        )
    if params.allowed_token_ids:
        others = set(range(VOCAB_SIZE)) - set(params.allowed_token_ids)
        processors.append(SuppressTokensLogitsProcessor(sorted(others)))
    return processors


def merge(a: SamplingParams, b: SamplingParams) -> SamplingParams:
    """What either asks for; `b` wins."""
    neutral = SamplingParams()
    names = [
        "repetition_penalty",
        "min_tokens",
        "suppressed_token_ids",
        "logit_bias",
        "allowed_token_ids",
        "bad_words_token_ids",
    ]
    given = {name: getattr(b, name) for name in names if getattr(b, name) != getattr(neutral, name)}
    return replace(a, **given)


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 30])
def test_logits_are_adjusted_as_hugging_face_does_when_all_is_combined(num_tokens: int) -> None:
    prompt_len = (num_tokens + 1) // 2
    pairs = [merge(a, b) for a, b in product(PROCESSORS, PROCESSORS)]
    rng = np.random.default_rng(num_tokens)
    histories = rng.integers(0, 3, (len(pairs), num_tokens)).tolist()
    logits = random_logits(len(pairs), has_ties=False)
    rows = make_sampling_rows(
        pairs,
        positions=num_tokens,
        num_prompt_tokens=prompt_len,
        # Tokens after the position do not count.
        histories=[[*history, 1, 2] for history in histories],
    )
    counts = TokenCounts(VOCAB_SIZE, logits.device)
    adjusted = adjust_logits(
        logits,
        rows.params,
        rows.positions,
        rows.num_prompt_tokens,
        rows.histories,
        counted=rows.with_counts(counts, np.arange(len(pairs), dtype=np.int32)).counted,
    )
    for row, params in enumerate(pairs):
        processors = hf_processors(params, prompt_len)
        expected = process(processors, [histories[row]], logits[row : row + 1])
        assert torch.equal(adjusted[row], expected[0]), params
