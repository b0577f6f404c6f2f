"""The model that most tests of executors share."""

from __future__ import annotations

import pytest

from executor_service.model import LoadedModel
from tests.support.models.tiny_models import load_tiny_model


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A small Llama. Its attention belongs to the runner that was made last."""
    return load_tiny_model("llama", tmp_path_factory.mktemp("llama"))
