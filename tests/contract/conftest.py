"""Executors behind a real gRPC server: the fake runner, and tiny random models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc.aio
import pytest

from executor_service.steps import Feature
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc import channel_options
from tests.contract.served import (
    MAX_MESSAGE_BYTES,
    SLIDING_WINDOW,
    Backend,
    GatedRunner,
    Served,
    make_fake_backend,
    make_info,
)
from tests.support.fakes.fake_executor import serve_executor
from tests.support.fakes.fake_runner import FakeRunner

if TYPE_CHECKING:
    from tests.contract.served_model import TinyModel


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A tiny random Llama, loaded once."""
    from tests.contract.served_model import load_tiny_model

    return load_tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A tiny random Mistral, in which every layer has a sliding window."""
    from tests.contract.served_model import load_tiny_model

    directory = tmp_path_factory.mktemp("models")
    return load_tiny_model("mistral", directory, {"sliding_window": SLIDING_WINDOW})


@pytest.fixture(params=["fake", "real", "late"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "fake":
        return make_fake_backend()
    from tests.contract.served_model import make_model_backend

    llama: TinyModel = request.getfixturevalue("llama")
    return make_model_backend(llama, is_late=request.param == "late")


@pytest.fixture
async def served(backend: Backend) -> AsyncIterator[Served]:
    async with _serve(backend) as served:
        yield served


@pytest.fixture(params=["fake", "real"])
def backend_window(request: pytest.FixtureRequest) -> Backend:
    """Every layer of the model has the window SLIDING_WINDOW."""
    if request.param == "fake":
        return make_fake_backend(sliding_window=SLIDING_WINDOW)
    from tests.contract.served_model import make_model_backend

    return make_model_backend(request.getfixturevalue("mistral"))


@pytest.fixture
async def served_window(backend_window: Backend) -> AsyncIterator[Served]:
    """Every layer of the model has the window SLIDING_WINDOW."""
    async with _serve(backend_window) as served:
        yield served


@pytest.fixture(params=["fake", "real"])
async def served_several(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """A row may get several tokens in one step, and gets all that it may."""
    backend = make_fake_backend()
    if request.param == "real":
        from tests.contract.served_model import make_model_backend

        backend = make_model_backend(request.getfixturevalue("llama"))
    async with _serve(_with_several(backend)) as served:
        yield served


@pytest.fixture
async def served_late_several(llama: TinyModel) -> AsyncIterator[Served]:
    """As on a GPU: a row gets what drafts bring, and runs on no further if the host had to wait."""
    from tests.contract.served_model import make_model_backend

    async with _serve(_with_several(make_model_backend(llama, is_late=True))) as served:
        yield served


@pytest.fixture
async def served_window_several(backend_window: Backend) -> AsyncIterator[Served]:
    """Both."""
    async with _serve(_with_several(backend_window)) as served:
        yield served


def _with_several(backend: Backend) -> Backend:
    several = {Feature.SEVERAL_TOKENS, Feature.PARTIAL_RESULTS}
    return replace(backend, features=backend.features | several)


@pytest.fixture
async def served_all() -> AsyncIterator[Served]:
    """An executor with all features; there is only a fake one."""
    async with _serve(make_fake_backend(frozenset(Feature))) as served:
        yield served


@asynccontextmanager
async def _serve(backend: Backend) -> AsyncIterator[Served]:
    gate = GatedRunner(backend.runner)
    async with serve_executor(make_info(backend), gate) as server:
        address = server.info.address
        # A client may send more than the executor takes: that is one of the tests.
        options = channel_options(4 * MAX_MESSAGE_BYTES)
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = executor_pb2_grpc.ExecutorServiceStub(channel)
            yield Served(backend, gate, server, stub)
            gate.open()
    if isinstance(backend.runner, FakeRunner):
        assert backend.runner.violations == []
