"""One stack for all tests of clients, for each process of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.stack import ServedModel, served_model


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """The bundled model, over HTTP."""
    with served_model(tmp_path_factory.mktemp("model")) as running:
        yield running
