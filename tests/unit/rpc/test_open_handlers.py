from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from splitserve_rpc.server import OpenHandlers
from tests.support.processes.patience import PATIENCE_S


async def test_only_handlers_are_waited_for_when_a_server_stops() -> None:
    handlers, begun, ended = OpenHandlers(), asyncio.Event(), []

    async def wait(request: bytes, context: grpc.aio.ServicerContext) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            # What a handler has to do yet.
            for _ in range(10):
                await asyncio.sleep(0)
            ended.append(request)

    server = grpc.aio.server(interceptors=[handlers])
    method = grpc.unary_unary_rpc_method_handler(wait)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("a.Service", {"Wait": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    # As that of the process which stops its servers.
    other = asyncio.create_task(asyncio.Event().wait())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary("/a.Service/Wait")(b"a request")
        await begun.wait()
        assert not await handlers.wait_ended(0)
        await server.stop(None)

        assert await handlers.wait_ended(PATIENCE_S)

        assert ended == [b"a request"]
        assert not other.done()
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    other.cancel()


async def test_nothing_is_waited_for_when_no_call_is_open() -> None:
    assert await OpenHandlers().wait_ended(0)
