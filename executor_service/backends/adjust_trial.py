"""Tries what changes logits before tokens are drawn against plain torch, on a whole vocabulary.

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from executor_service.device.streams import streams_of
from executor_service.device.uploads import Uploads
from executor_service.errors import TrialFailed
from executor_service.sampling.sampler import Adjust, SamplingRows, adjust_in_torch
from executor_service.sampling.token_counts import TokenCounts
from executor_service.steps.sampling_params import Grammar, ParamRows, SamplingParams
from executor_service.steps.token_masks import TokenMasks

# They should have the same bits; a device whose division rounds otherwise serves as well.
_TOLERANCE = 1e-6
_NUM_TOKENS = 40
_NUM_PROMPT_TOKENS = 30


@torch.inference_mode()
def try_adjust(adjust: Adjust, vocab_size: int, device: torch.device) -> None:
    """Adjusts random logits by `adjust` and in plain torch. Raises TrialFailed if they differ."""
    generator = torch.Generator().manual_seed(0)
    params = _params(vocab_size)
    logits = (3 * torch.randn(len(params), vocab_size, generator=generator)).to(device)
    before = logits.clone()
    uploads = Uploads(device, streams_of(device))
    rows = _rows(params, vocab_size, device, uploads)
    expected = adjust_in_torch(logits, rows, uploads)
    actual = adjust(logits, rows, uploads)
    is_same = torch.isclose(actual, expected, rtol=_TOLERANCE, atol=0.0)
    wrong = (~is_same).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        raise TrialFailed(f"logits differ (row {wrong[0]} of {len(params)}, {params[wrong[0]]})")
    if not torch.equal(logits, before):
        raise TrialFailed("the logits given are overwritten")


def _params(vocab_size: int) -> list[SamplingParams]:
    last = vocab_size - 1
    bias = {token: 0.1 * token - 3 for token in range(0, vocab_size, max(1, vocab_size // 300))}
    grammar = Grammar("regex", ("a",))
    return [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.7, frequency_penalty=0.3, presence_penalty=-0.9),
        SamplingParams(logit_bias=bias),
        SamplingParams(logit_bias={last: 5.0}, frequency_penalty=-1.7, repetition_penalty=1.1),
        SamplingParams(
            logit_bias={0: -math.inf, last: 1.0}, min_tokens=99, suppressed_token_ids=(last,)
        ),
        SamplingParams(allowed_token_ids=(0, last), presence_penalty=0.2),
        SamplingParams(grammar=grammar),
        SamplingParams(grammar=grammar, allowed_token_ids=tuple(range(0, vocab_size, 2))),
    ]


def _rows(
    params: list[SamplingParams], vocab_size: int, device: torch.device, uploads: Uploads
) -> SamplingRows:
    count = len(params)
    random = np.random.default_rng(0)
    with_grammar = np.array([row for row in range(count) if params[row].grammar is not None])
    words = random.integers(
        -(2**31), 2**31, (len(with_grammar), -(-vocab_size // 32)), dtype=np.int64
    )
    rows = SamplingRows(
        params=ParamRows.of(params),
        seeds=np.zeros(count, np.int64),
        positions=np.full(count, _NUM_TOKENS, np.int32),
        num_prompt_tokens=np.full(count, _NUM_PROMPT_TOKENS, np.int32),
        histories=random.integers(vocab_size, size=(count, _NUM_TOKENS)).tolist(),
        masks=TokenMasks(with_grammar, words.astype(np.int32), (), {}),
    )
    return rows.with_counts(
        TokenCounts(vocab_size, device, uploads), np.arange(count, dtype=np.int32)
    )
