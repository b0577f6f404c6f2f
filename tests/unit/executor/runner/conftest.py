"""The model that tests of recordings share."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.model.loaded_model import LoadedModel
from tests.support.models.tiny_models import make_tiny_model
from tests.unit.executor.runner.recorded_steps import (
    BLOCK_SIZE,
    TABLE_WIDTH,
)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory: Path = tmp_path_factory.mktemp(request.param)
    make_tiny_model(request.param, directory)
    return load_model(ModelConfig(str(directory), max_model_len=TABLE_WIDTH * BLOCK_SIZE))
