"""A model whose layers all have a sliding window: blocks behind it are nobody's business."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import load_engine
from executor_service.model.loaded_model import LoadedModel
from executor_service.runner.model_runner import ModelRunner
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from executor_service.steps.executor_info import SAMPLING_FEATURES, Feature
from executor_service.steps.step import RowStatus
from splitserve_options import options
from tests.support.models.tiny_models import SLIDING_WINDOW, make_tiny_model
from tests.support.steps.step_driver import Row, make_step

BLOCK_SIZE = 4
BAD_TOKEN = 99
PROMPT = [(11 * i + 5) % 90 for i in range(21)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("mistral", tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def loaded(directory: Path) -> LoadedModel:
    return load_model(ModelConfig(str(directory)))


@pytest.fixture
def runner(loaded: LoadedModel) -> ModelRunner:
    return build_runner(loaded, CacheConfig(BLOCK_SIZE, num_device_blocks=20, num_host_blocks=0))


def _next_row(table: tuple[int, ...]) -> Row:
    """The token after PROMPT, which reads from position 10 on."""
    return Row([7], len(PROMPT), table, len(PROMPT))


def test_execute_is_unaffected_when_blocks_behind_the_window_are_gone(runner: ModelRunner) -> None:
    runner.execute(make_step([Row(PROMPT, 0, range(6), len(PROMPT))]))
    expected = runner.execute(make_step([_next_row((0, 1, 2, 3, 4, 5))])).sampled_token_ids
    for pool in (*runner.cache.key_pools, *runner.cache.value_pools):
        pool[:2] = torch.nan
    for table in ((0, 1, 2, 3, 4, 5), (-1, -1, 2, 3, 4, 5)):
        output = runner.execute(make_step([_next_row(table)]))
        assert output.sampled_token_ids.tolist() == expected.tolist()


def test_execute_keeps_a_row_when_a_failed_one_has_its_old_block(
    loaded: LoadedModel, runner: ModelRunner
) -> None:
    def break_down(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if bool((args[0] == BAD_TOKEN).any()):
            raise ValueError("asked for")

    runner.execute(make_step([Row(PROMPT, 0, range(6), len(PROMPT))]))
    table = (0, 1, 2, 3, 4, 5)
    expected = runner.execute(make_step([_next_row(table)])).sampled_token_ids.tolist()
    embeddings = loaded.model.get_input_embeddings()  # type: ignore[operator]
    handle = embeddings.register_forward_pre_hook(break_down)
    output = runner.execute(make_step([Row([BAD_TOKEN], 0, (1,), 1), _next_row(table)]))
    handle.remove()
    assert output.row_statuses.tolist() == [RowStatus.FAILED, RowStatus.OK]
    assert output.sampled_token_ids.tolist() == [-1, *expected]


def test_load_engine_announces_window_and_features_when_the_model_has_them(
    directory: Path,
) -> None:
    values = options.parse("executor", [f"--model={directory}", "--num-device-blocks=8"], {})
    info = load_engine(ExecutorConfig.from_options(values), executor_epoch=1).info
    assert info.model.sliding_window == SLIDING_WINDOW
    assert info.features == SAMPLING_FEATURES | {Feature.SEVERAL_TOKENS}
    assert info.limits.max_adapters_per_step is None
