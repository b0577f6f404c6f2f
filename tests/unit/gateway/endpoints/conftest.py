"""A gateway before models that return vectors, for the tests of one module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.unit.gateway.endpoints.vector_gateway import VectorGateway, vector_gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_vectors() -> AsyncIterator[VectorGateway]:
    async with vector_gateway() as gateway:
        yield gateway


@pytest.fixture
def gateway(running_vectors: VectorGateway) -> VectorGateway:
    """The running gateway, whose schedulers have forgotten earlier requests."""
    for fake in running_vectors.fakes.values():
        fake.requests.clear()
    return running_vectors
