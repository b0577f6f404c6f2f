"""Greedy and random choice against the executor's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_service.sampling.philox import uniform
from executor_service.sampling.sampler import SamplingRows
from executor_service.sampling.sampler import sample as sample_by_oracle
from executor_service.steps.sampling_params import ParamRows, SamplingParams

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from splitserve_kernels.gpu import philox
from splitserve_kernels.gpu.sampling import greedy, sample

SEEDS = (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**63), 123456789012345)


def _logits(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Rows do not lie next to each other."""
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(num_rows, vocab_size + 5, generator=generator).to(device)[:, :-5] * 2


def _oracle(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    count = len(logits)
    rows = SamplingRows(
        params=ParamRows.of([SamplingParams(temperature=t) for t in temperatures.tolist()]),
        seeds=seeds.cpu().numpy(),
        positions=positions.cpu().numpy().astype(np.int32),
        num_prompt_tokens=np.zeros(count, dtype=np.int32),
        histories=[None] * count,
    )
    return sample_by_oracle(logits.cpu(), rows)


def _assert_equals_oracle(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> None:
    expected = _oracle(logits, temperatures, seeds, positions)
    token_ids, is_valid = sample(logits, temperatures, seeds, positions)
    assert is_valid.tolist() == (expected >= 0).tolist()
    assert token_ids.tolist() == expected.tolist()


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
    token_ids, is_valid = greedy(logits)
    assert token_ids.tolist() == logits.argmax(dim=-1).tolist()
    assert bool(is_valid.all())


def test_greedy_takes_the_smallest_id_when_logits_tie(device: torch.device) -> None:
    logits = torch.zeros(4, 9001, device=device)
    logits[1, [8000, 17, 300]] = 5.0
    logits[2, :] = -1.0
    logits[2, [4097, 8192, 4096]] = -0.0
    logits[3, 100:] = -torch.inf
    assert greedy(logits)[0].tolist() == [0, 17, 4096, 0]


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
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sample_marks_the_row_when_no_token_can_be_told(
    temperature: float, device: torch.device
) -> None:
    logits = _broken_logits(device)
    columns = torch.arange(8, device=device)
    temperatures = torch.full((8,), temperature, device=device)
    _assert_equals_oracle(logits, temperatures, columns, columns)
    token_ids, is_valid = greedy(logits)
    assert is_valid.tolist() == [True, False, False, False, False, True, False, True]
    assert (token_ids >= 0).tolist() == is_valid.tolist()


@pytest.mark.parametrize("vocab_size", [1, 701, 9001])
def test_sample_equals_the_executors_when_temperatures_differ(
    vocab_size: int, device: torch.device
) -> None:
    count = 40
    logits = _logits(count, vocab_size, device)
    temperatures = torch.tensor([0.0, 0.3, 1.0, 1e-30, 5.0] * (count // 5), device=device)
    seeds = torch.arange(count, device=device) * 0x123456789ABCDEF - 9
    positions = torch.arange(count, device=device) * 13
    _assert_equals_oracle(logits, temperatures, seeds, positions)


def test_sample_draws_no_token_without_weight_when_most_have_none(device: torch.device) -> None:
    count = 40
    logits = torch.full((count, 9001), -torch.inf, device=device)
    logits[:, [3, 4095, 8500]] = torch.tensor([0.1, 0.7, -0.4], device=device)
    columns = torch.arange(count, device=device)
    _assert_equals_oracle(logits, torch.ones(count, device=device), columns, columns)


def test_choices_are_empty_when_there_are_no_rows(device: torch.device) -> None:
    none, ids = torch.empty(0, 9, device=device), torch.empty(0, dtype=torch.int64, device=device)
    for token_ids, is_valid in (greedy(none), sample(none, none[:, 0], ids, ids)):
        assert token_ids.shape == is_valid.shape == (0,)
