"""A checker with its processes, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from splitserve_gateway.grammars.checker import GrammarChecker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    await made.close()
