from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.security.secured_stack import SecuredStack, secured_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredStack]:
    """Everything that runs, once for a module."""
    async with secured_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running
