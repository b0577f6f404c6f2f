"""One stack for all tests of clients, for each process of tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from openai import OpenAI

from tests.clients.record_vllm import served_model_name
from tests.clients.stack import ServedModel, served_model
from tests.support.processes.gateway import WatchedGateway, watched_gateway


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """The bundled model, over HTTP.

    With SPLITSERVE_TEST_BASE_URL it is what serves there: so that the tests can be tried on another
    server, as `vllm_recording/README.md` starts it.
    """
    base_url = os.environ.get("SPLITSERVE_TEST_BASE_URL")
    if base_url is not None:
        yield ServedModel(base_url, "", served_model_name(base_url))
        return
    with served_model(tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.fixture
def client(served: ServedModel) -> Iterator[OpenAI]:
    """The official client, without retries."""
    with OpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(served: ServedModel) -> str:
    """The name of the model."""
    return served.model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WatchedGateway]:
    """A gateway before one sequence at a time and a queue of one, and the watch of its steps."""
    folder = tmp_path_factory.mktemp("tokenizer")
    async with watched_gateway(folder, max_num_seqs=1, max_num_waiting=1) as running:
        yield running
