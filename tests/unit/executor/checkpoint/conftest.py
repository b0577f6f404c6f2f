"""The checkpoint that most tests of loading change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.tiny_models import make_tiny_model


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "tiny-llama")
