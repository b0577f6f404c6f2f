"""Tiny models, loaded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.models.model_pair import ModelPair


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelPair]:
    """The ModelPair of an architecture (with options of its configuration)."""
    from tests.support.models.model_pair import model_pairs

    return model_pairs(tmp_path_factory.mktemp)
