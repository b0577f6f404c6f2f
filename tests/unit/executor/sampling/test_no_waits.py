"""Choosing tokens waits for nothing that a device has yet to find, whatever rows ask for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from executor_service.sampling.sampler import (
    Draw,
    SamplingRows,
    draw_in_torch,
    draw_unseen_in_torch,
    sample,
)
from executor_service.sampling.token_counts import TokenCounts
from executor_service.sampling.truncation import score
from executor_service.steps.sampling_params import ParamRows, SamplingParams
from tests.support.devices.no_waits import WaitedForDevice, nobody_waits

VOCAB_SIZE = 300
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(top_k=5, top_p=0.9, min_p=0.02),
    SamplingParams(top_p=0.5, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.1),
    SamplingParams(logit_bias={3: 1.5, 4: -math.inf}, num_logprobs=3),
    SamplingParams(min_tokens=9, suppressed_token_ids=(1, 2)),
    SamplingParams(allowed_token_ids=(5, 6, 7), bad_words_token_ids=((5,), (3, 6))),
)


def _rows() -> SamplingRows:
    count = len(PARAMS)
    return SamplingRows(
        params=ParamRows.of(PARAMS),
        seeds=np.arange(count, dtype=np.int64),
        positions=np.full(count, 4, np.int32),
        num_prompt_tokens=np.full(count, 2, np.int32),
        histories=[[1, 2, 3, 3]] * count,
    )


def _sample(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    return sample(logits, _rows(), draw)


def test_sample_waits_for_nothing_when_torch_draws_unseen() -> None:
    logits = torch.randn(len(PARAMS), VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    expected = _sample(logits, draw_in_torch).tolist()
    with nobody_waits():
        token_ids = _sample(logits, draw_unseen_in_torch)
        score(logits, token_ids, 3)
    assert token_ids.tolist() == expected


def test_sample_waits_for_nothing_when_kernels_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from triton.runtime.interpreter import GridExecutor

    from executor_service.backends.gpu_draw import triton_adjust, triton_draw

    launched = []
    # The interpreter itself would read tensors.
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: launched.append(self.fn))
    logits = torch.zeros(len(PARAMS), VOCAB_SIZE)
    with nobody_waits():
        _sample(logits, triton_draw)
    assert len(launched) == 6
    with nobody_waits():
        sample(logits, _rows(), triton_draw, triton_adjust)
    assert len(launched) == 6 + 7


def test_counts_wait_for_nothing_when_a_step_is_added() -> None:
    counts, token_ids = TokenCounts(VOCAB_SIZE, torch.device("cpu")), torch.zeros(8).int()
    with nobody_waits():
        for _ in range(2):
            counted = _rows().with_counts(counts, np.arange(8, dtype=np.int32)).counted
            assert counted is not None
            counts.add(counted, token_ids)


def test_nobody_waits_raises_when_torch_looks_at_what_was_found() -> None:
    with pytest.raises(WaitedForDevice), nobody_waits():
        _sample(torch.randn(len(PARAMS), VOCAB_SIZE), draw_in_torch)
