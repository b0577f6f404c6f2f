"""Both executors behind a real gRPC server: the fake runner, and a tiny random Llama."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc.server import channel_options
from tests.contract.served import (
    MAX_MESSAGE_BYTES,
    Backend,
    GatedRunner,
    Served,
    make_fake_backend,
    make_info,
)
from tests.support.executor_server import serve_executor
from tests.support.fake_runner import FakeRunner


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401
    """A tiny random Llama, loaded once."""
    from tests.contract.served_llama import load_llama

    return load_llama(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=["fake", "real"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "fake":
        return make_fake_backend()
    from tests.contract.served_llama import make_llama_backend

    return make_llama_backend(request.getfixturevalue("llama"))


@pytest.fixture
async def served(backend: Backend) -> AsyncIterator[Served]:
    gate = GatedRunner(backend.runner)
    async with serve_executor(make_info(backend.vocab_size), gate) as server:
        address = server.info.address
        # A client may send more than the executor takes: that is one of the tests.
        options = channel_options(4 * MAX_MESSAGE_BYTES)
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = executor_pb2_grpc.ExecutorServiceStub(channel)
            yield Served(backend, gate, server, stub)
            gate.open()
    if isinstance(backend.runner, FakeRunner):
        assert backend.runner.violations == []
