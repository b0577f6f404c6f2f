"""The boundary of every server: what it looks at before a message is decoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from splitserve_rpc.access import Access
from splitserve_rpc.interceptors import BoundaryInterceptor


class Refused(Exception):
    """As the library ends a call."""


class Context:
    """As much of a call as its boundary needs."""

    async def abort_with_status(self, status: Any) -> None:  # noqa: ANN401
        self.status = status
        raise Refused


async def handler_of_lengths(limit: int, decoded: list[bytes]) -> Any:  # noqa: ANN401
    """A method that says how many bytes its message has, behind a boundary."""

    def decode(message: bytes) -> bytes:
        decoded.append(message)
        return message

    async def method(message: bytes, _context: object) -> int:
        return len(message)

    async def continuation(_details: object) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(method, decode, str)

    details = SimpleNamespace(method="/grpc.health.v1.Health/Check", invocation_metadata=())
    handler = await BoundaryInterceptor(lambda: limit, Access()).intercept_service(
        continuation, details
    )
    return handler.unary_unary


async def test_message_is_not_decoded_when_it_is_too_large() -> None:
    decoded: list[bytes] = []
    context = Context()
    call = await handler_of_lengths(10, decoded)
    with pytest.raises(Refused):
        await call(bytes(11), context)
    (value,) = (value for key, value in context.status.trailing_metadata if key.endswith("-bin"))
    assert b"MESSAGE_TOO_LARGE" in value
    assert "11 bytes" in context.status.details
    assert decoded == []


async def test_message_is_decoded_when_it_is_as_large_as_it_may_be() -> None:
    decoded: list[bytes] = []
    call = await handler_of_lengths(10, decoded)
    assert await call(bytes(10), Context()) == 10
    assert decoded == [bytes(10)]
