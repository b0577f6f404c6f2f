"""A checker with its processes, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from splitserve_gateway.grammars import CheckerLimits, GrammarChecker
from tests.support.processes.patience import PATIENCE_S


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker() -> AsyncIterator[GrammarChecker]:
    # What a grammar may cost is for tests that say so: a slow machine refuses no other.
    made = GrammarChecker(CheckerLimits(max_cpu_s=10, max_wall_s=PATIENCE_S))
    yield made
    await made.close()
