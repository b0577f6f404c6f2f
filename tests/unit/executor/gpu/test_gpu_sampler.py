"""Tokens drawn by the kernel and by torch, rows of all kinds beside each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_service.sampling.sampler import SamplingRows, draw_in_torch
from executor_service.sampling.sampler import sample as sample_rows
from executor_service.steps.sampling_params import ParamRows, SamplingParams
from executor_service.trials.kernel_trials import try_draw

pytest.importorskip("triton", reason="triton is not installed")

from executor_service.backends.gpu_draw import triton_draw

GREEDY, RANDOM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)
CUT = (
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=0.7, top_p=0.5),
    SamplingParams(temperature=1.3, min_p=0.2),
)
MIXTURES = (
    (GREEDY,),
    (RANDOM,),
    CUT,
    (GREEDY, RANDOM, *CUT),
    (CUT[0], GREEDY, SamplingParams(temperature=0.0, top_k=1)),
)
NUM_ROWS = 15


def _problem(
    params: tuple[SamplingParams, ...], vocab_size: int, device: torch.device
) -> tuple[Tensor, SamplingRows]:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(NUM_ROWS, vocab_size + 2, generator=generator)[:, 1:-1]
    logits[3, 0] = torch.nan
    logits[7, vocab_size - 1] = torch.inf
    logits[11] = -torch.inf
    rows = SamplingRows(
        params=ParamRows.of([params[row % len(params)] for row in range(NUM_ROWS)]),
        seeds=np.arange(NUM_ROWS, dtype=np.int64) * -0x3456789ABCDEF,
        positions=np.arange(NUM_ROWS, dtype=np.int32) + 5,
        num_prompt_tokens=np.zeros(NUM_ROWS, np.int32),
        histories=[None] * NUM_ROWS,
    )
    return logits.to(device), rows


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("params", MIXTURES)
@pytest.mark.parametrize("vocab_size", [1, 701, 9001])
def test_triton_draw_chooses_what_torch_does_when_rows_differ(
    params: tuple[SamplingParams, ...], vocab_size: int, device: torch.device
) -> None:
    logits, rows = _problem(params, vocab_size, device)
    before = logits.clone()
    token_ids = triton_draw(logits, rows)
    assert token_ids.dtype == torch.int32
    assert token_ids.tolist() == draw_in_torch(logits, rows).tolist()
    assert [row for row in range(NUM_ROWS) if token_ids[row] < 0] == [3, 7, 11]
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sample_chooses_the_same_when_biases_hide_what_is_wrong(device: torch.device) -> None:
    hiding = SamplingParams(temperature=0.8, suppressed_token_ids=(0, 700))
    logits, rows = _problem((hiding, GREEDY), 701, device)
    expected = sample_rows(logits, rows).tolist()
    assert sample_rows(logits, rows, triton_draw).tolist() == expected
    assert expected[7] == expected[11] == -1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_try_draw_passes_when_the_kernel_draws(device: torch.device) -> None:
    try_draw(triton_draw, 9001, device)
