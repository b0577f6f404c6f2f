from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.device.kv_cache import KVCache
from executor_service.model.paged_model import torch_model
from executor_service.runner import forward_pass as scored_parts
from executor_service.runner import pool_sizes as worst_step
from executor_service.runner.model_runner import ModelRunner
from executor_service.runner.pool_sizes import (
    StepSize,
    make_worst_step,
    measure_worst_step,
    num_worst_step_blocks,
)
from executor_service.steps.step import FinishedStep, RowStatus, StepInput, StepOutput
from tests.support.models.tiny_models import make_tiny_model

VOCAB_SIZE = 50
BLOCK_SIZE = 4


@pytest.mark.parametrize("attends_back", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "max_model_len", "num_new"),
    [
        (3, 10, 100, [8, 1, 1]),
        (3, 10, 4, [4, 4, 2]),
        (3, 100, 4, [4, 4, 4]),
        (8, 3, 100, [1, 1, 1]),
        (2, 5, 1, [1, 1]),
        (1, 7, 9, [7]),
    ],
)
def test_make_worst_step_is_as_large_as_it_may_be_when_limits_differ(
    num_rows: int, num_tokens: int, max_model_len: int, num_new: list[int], attends_back: bool
) -> None:
    size = StepSize(num_rows, num_tokens, max_model_len, attends_back)
    step = make_worst_step(size, BLOCK_SIZE, VOCAB_SIZE)
    assert step.num_new_tokens.tolist() == num_new
    assert len(step.token_ids) == sum(num_new)
    assert step.token_ids.max() < VOCAB_SIZE
    assert step.samples.all()
    ends = step.num_computed_tokens + step.num_new_tokens
    assert ends.tolist() == [max_model_len if attends_back else num_new[0], *num_new[1:]]
    for history, end in zip(step.histories, ends.tolist(), strict=True):
        assert history is not None
        # The token after the input is scored; more would only take time.
        assert len(history) == end + 1
    for table, end in zip(step.block_tables, ends.tolist(), strict=True):
        num_blocks = -(-end // BLOCK_SIZE)
        used = table[:num_blocks]
        assert ((used >= 0) & (used < num_worst_step_blocks(size, BLOCK_SIZE))).all()
        assert (table[num_blocks:] == -1).all()


def test_make_worst_step_writes_blocks_of_its_own_when_a_row_attends_back() -> None:
    size = StepSize(num_rows=1, num_tokens=6, max_model_len=20, attends_back=True)
    step = make_worst_step(size, BLOCK_SIZE, VOCAB_SIZE)
    # Positions 14 to 19 are in the last two blocks; what lies before them is block 0.
    np.testing.assert_array_equal(step.block_tables, [[0, 0, 0, 1, 2]])


class _Meter:
    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return 7


class _Listening:
    """A runner, and what became of its steps."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.outputs: list[StepOutput] = []

    def begin(self, step: StepInput) -> FinishedStep:
        self.outputs.append(self.runner.execute(step))
        return FinishedStep(self.outputs[-1])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("attends_back", [False, True])
def test_measure_worst_step_computes_every_row_when_the_model_is_real(
    tmp_path: Path, architecture: str, attends_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (scored_parts, worst_step):
        monkeypatch.setattr(module, "MAX_SCORED_TOKENS", 50)
    loaded = load_model(ModelConfig(str(make_tiny_model(architecture, tmp_path))))
    size = StepSize(5, 70, loaded.max_model_len, attends_back)
    cache = KVCache(
        layers=loaded.layers,
        block_size=BLOCK_SIZE,
        num_device_blocks=num_worst_step_blocks(size, BLOCK_SIZE),
        num_host_blocks=0,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    runner = _Listening(ModelRunner(loaded, cache, torch_model(loaded, cache)))
    assert measure_worst_step(size, cache, loaded.vocab_size, lambda: runner, _Meter()) == 7
    [output] = runner.outputs
    assert output.row_statuses.tolist() == [RowStatus.OK] * 5
    assert (output.sampled_token_ids >= 0).all()
    assert output.logprobs is not None
    assert len(output.logprobs.token_ids) == 5
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs.token_ids) == 50
