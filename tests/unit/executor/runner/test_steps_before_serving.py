"""Steps before serving: those that compile kernels, measure time, and measure memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.device import KVCache
from executor_service.errors import StepFailed
from executor_service.model import LoadedModel, torch_model
from executor_service.runner import (
    CacheConfig,
    ModelRunner,
    StepSize,
    build_runner,
    compile_kernels,
    full_step_sizes,
    make_worst_step,
    measure_step,
    measure_worst_step,
    num_worst_step_blocks,
    step_sizes,
)
from executor_service.runner import forward_pass as scored_parts
from executor_service.runner import kernel_warm_up as trial_step
from executor_service.runner import pool_sizes as worst_step
from executor_service.steps import FinishedStep, RowStatus, StepInput, StepOutput
from tests.support.models.tiny_models import load_tiny_model, make_tiny_model


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        "llama", tmp_path_factory.mktemp("model"), overrides={"num_hidden_layers": 1}
    )


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "max_num_batched_tokens", "num_tokens", "num_known"),
    [(1, 3, 16, 1, 2), (9, 24, 16, 16, 23), (9, 24, 5, 5, 23), (9, 24, 0, 16, 23), (1, 2, 1, 1, 1)],
)
def test_step_is_measured_when_there_is_little_room(
    one_layer: Path,
    num_blocks: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    num_tokens: int,
    num_known: int,
) -> None:
    loaded = load_model(ModelConfig(str(one_layer), max_model_len=max_model_len))
    runner = build_runner(loaded, CacheConfig(4, num_blocks, num_host_blocks=0))
    trial = measure_step(runner, loaded, max_num_batched_tokens)
    assert trial is not None
    assert (trial.num_tokens, trial.num_attended) == (num_tokens, num_tokens * num_known)
    assert trial.took_us >= 1


@pytest.mark.parametrize(
    ("times_s", "took_s"), [([1.0, 1.4, 2.0, 2.1], 0.1), ([1.0, 3.0], 2.0)], ids=["short", "long"]
)
def test_step_is_measured_again_when_it_was_short(
    loaded: LoadedModel, times_s: list[float], took_s: float
) -> None:
    runner = build_runner(loaded, CacheConfig(4, 9, num_host_blocks=0))
    times = iter(times_s)
    trial = measure_step(runner, loaded, 16, lambda: next(times))
    assert trial is not None
    assert trial.took_us == round(took_s * 1e6)
    assert not list(times)


def test_measure_step_returns_none_when_the_step_fails(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_runner: ModelRunner, _step: StepInput) -> None:
        raise StepFailed("out of memory")

    runner = build_runner(loaded, CacheConfig(4, 9, num_host_blocks=0))
    monkeypatch.setattr(trial_step, "execute_step", fail)
    assert measure_step(runner, loaded, 16) is None


def _tile(num_queries: int) -> int:
    """Queries of a tile: a power of two, 16 to 128."""
    return min(128, max(16, 1 << (num_queries - 1).bit_length()))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_steps_have_tiles_of_all_sizes_that_prompts_can_have(group: int) -> None:
    sizes = list(step_sizes(8192, 256))
    tried = {_tile(group * max(new)) for new in sizes if max(new) > 1}
    assert tried == {_tile(group * longest) for longest in range(2, 2000)}


def test_steps_are_decodes_and_prompts_and_both() -> None:
    sizes = list(step_sizes(8192, 256))
    assert {len(new) for new in sizes if max(new) == 1} >= {1, 2, 16}
    assert [2] in sizes
    assert any(min(new) == 1 < max(new) for new in sizes)


def test_full_steps_have_as_many_prompts_as_fit() -> None:
    small = {max(new) for new in step_sizes(8192, 256) if max(new) > 1}
    full = list(full_step_sizes(8192, 256))
    assert {max(new) for new in full} == small
    assert all(len(new) == min(256, 8192 // new[0]) for new in full)


@pytest.mark.parametrize(("most_tokens", "most_rows"), [(1, 1), (4, 2), (9, 3), (40, 300)])
def test_steps_stay_within_limits(most_tokens: int, most_rows: int) -> None:
    sizes = [*step_sizes(most_tokens, most_rows), *full_step_sizes(most_tokens, most_rows)]
    assert [1] in sizes
    assert max(sum(new) for new in sizes) <= most_tokens
    assert max(len(new) for new in sizes) <= most_rows


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(1, 3), (9, 24)])
def test_runner_takes_all_steps_when_there_is_little_room(
    one_layer: Path, caplog: pytest.LogCaptureFixture, num_blocks: int, max_model_len: int
) -> None:
    loaded = load_model(ModelConfig(str(one_layer), max_model_len=max_model_len))
    runner = build_runner(loaded, CacheConfig(4, num_blocks, num_host_blocks=0))
    with caplog.at_level("INFO"):
        compile_kernels(runner, loaded, 3, 16)
    assert "kernels_compiled num_steps=" in caplog.text
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


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
def test_make_worst_step_is_as_large_as_limits_allow(
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


def test_make_worst_step_writes_own_blocks_when_it_attends_back() -> None:
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
    loaded = load_tiny_model(architecture, tmp_path)
    size = StepSize(5, 70, loaded.max_model_len, attends_back)
    num_blocks = num_worst_step_blocks(size, BLOCK_SIZE)
    cache = KVCache(loaded.layers, BLOCK_SIZE, num_blocks, 0, loaded.dtype, loaded.device)
    runner = _Listening(ModelRunner(loaded, cache, torch_model(loaded, cache)))
    assert measure_worst_step(size, cache, loaded.vocab_size, lambda: runner, _Meter()) == 7
    [output] = runner.outputs
    assert output.row_statuses.tolist() == [RowStatus.OK] * 5
    assert (output.sampled_token_ids >= 0).all()
    assert output.logprobs is not None
    assert len(output.logprobs.token_ids) == 5
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs.token_ids) == 50
