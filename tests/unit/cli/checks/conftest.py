from __future__ import annotations

import pytest

from tests.support.security.cluster import Certificates


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of a cluster."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))
