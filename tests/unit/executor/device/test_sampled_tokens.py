"""What a step is fed from the device, by itself and among tokens that the host knows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor_service.device.resident_tables import SampledTokens
from executor_service.model.input_batch import build_input_batch
from executor_service.steps.step import AwaitedTokens, StepInput
from tests.support.steps.step_driver import Row, make_step

CPU = torch.device("cpu")


def _step(step_id: int, row_ids: list[int], rows: list[Row] | None = None) -> StepInput:
    step = make_step(rows or [Row([9], 0, (0,), 1) for _ in row_ids], step_id=step_id)
    return replace(step, row_ids=np.array(row_ids, np.int32))


def _tokens(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


@pytest.fixture
def sampled() -> SampledTokens:
    """Step 4: row 6 sampled 60, row 2 nothing valid, row 3 does not sample. Step 5: row 3, 31."""
    sampled = SampledTokens()
    sampled.keep(_step(4, [6, 2, 3]), np.array([0, 1]), _tokens(60, -1))
    sampled.keep(_step(5, [3]), np.array([0]), _tokens(31))
    return sampled


def _found(sampled: SampledTokens, step_ids: list[int], row_ids: list[int]) -> list[int]:
    tokens, indexes = sampled.find(np.array(step_ids), np.array(row_ids, np.int32))
    found: list[int] = tokens[torch.from_numpy(indexes)].tolist()
    return found


def test_find_gives_tokens_of_each_step_when_they_differ(sampled: SampledTokens) -> None:
    assert _found(sampled, [4, 5], [6, 3]) == [60, 31]
    assert _found(sampled, [5], [3]) == [31]


def test_find_gives_some_token_when_a_row_has_none(sampled: SampledTokens) -> None:
    # A GPU that is asked for the embedding of -1 is lost.
    assert min(_found(sampled, [4, 4], [2, 3])) >= 0


def test_find_finds_nothing_when_the_step_was_forgotten(sampled: SampledTokens) -> None:
    sampled.forget(4)
    sampled.forget(4)
    with pytest.raises(KeyError):
        _found(sampled, [4], [6])


@pytest.mark.parametrize(
    ("rows", "expected"),
    # Rows with one token come first.
    [([0, 1, 2], [60, 31, 7, 8]), ([1, 2], [31, 7, 8]), ([0], [60]), ([1], [7, 8])],
)
def test_input_batch_has_awaited_tokens_in_their_places(
    sampled: SampledTokens, rows: list[int], expected: list[int]
) -> None:
    work = [Row([0], 5, (0, 1), 5), Row([7, 8], 0, (2,), 2), Row([0], 4, (3, 4), 4)]
    step = replace(
        _step(6, [6, 2, 3], work), awaited=AwaitedTokens(np.array([0, 2]), np.array([4, 5]))
    )
    batch = build_input_batch(step, rows, 4, CPU, sampled)
    assert batch.input_ids.tolist() == [expected]
