"""The checks of `make clients` for the clients that are in the development environment."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.clients.matrix.run import outcomes, scripted_gateway


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_gateway() as url:
        yield url


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_client_passes_its_checks(client: str, url: str) -> None:
    script = f"tests.clients.matrix.{client}_checks"
    found = dict(outcomes([sys.executable, "-m", script], url))
    assert found.pop("version")
    assert len(found) > 4
    assert not {name: problem for name, problem in found.items() if problem}
