"""A scheduler that takes every executor, and sends it no steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from splitserve_rpc.server import bind_server


class FakeRegistry(registry_pb2_grpc.RegistryServiceServicer):
    """`registered`: who did, each time."""

    def __init__(self) -> None:
        self.registered: asyncio.Queue[pb.ExecutorInfo] = asyncio.Queue()

    async def Register(  # noqa: N802
        self, request: registry_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> registry_pb2.RegisterResponse:
        self.registered.put_nowait(request.executor)
        version = pb.ContractVersion(major=1)
        return registry_pb2.RegisterResponse(scheduler_epoch=1, contract_version=version)


@asynccontextmanager
async def fake_registry() -> AsyncIterator[tuple[FakeRegistry, str]]:
    """One that serves, and its address."""
    running = bind_server("127.0.0.1:0", ())
    servicer = FakeRegistry()
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, running.server)
    await running.server.start()
    yield servicer, f"127.0.0.1:{running.port}"
    await running.server.stop(None)
