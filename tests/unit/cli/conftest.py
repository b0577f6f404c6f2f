from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fakes.running_schedulers import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()
