"""The boundary of every server: what it looks at before a message is decoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from splitserve_rpc.access import Access
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.interceptors import BoundaryInterceptor


class Refused(Exception):
    """As the library ends a call."""


class Context:
    """As much of a call as its boundary needs."""

    async def abort_with_status(self, status: Any) -> None:  # noqa: ANN401
        self.status = status
        raise Refused


Heard = list[tuple[str, str]]
CHECK = "/grpc.health.v1.Health/Check"


def boundary(limit: int, heard: Heard) -> BoundaryInterceptor:
    """It appends to `heard` what it refuses."""

    def hear(method: str, _context: object, reason: str) -> None:
        heard.append((method, reason))

    return BoundaryInterceptor(lambda: limit, Access(), hear)


async def handler_of_lengths(limit: int, decoded: list[bytes], heard: Heard | None = None) -> Any:  # noqa: ANN401
    """A method that says how many bytes its message has, behind a boundary."""

    def decode(message: bytes) -> bytes:
        decoded.append(message)
        if message == b"?":
            raise DecodeError
        return message

    async def method(message: bytes, _context: object) -> int:
        if not message:
            raise DomainError("PROMPT_EMPTY", "nothing is in it")
        return len(message)

    async def continuation(_details: object) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(method, decode, str)

    details = SimpleNamespace(method=CHECK, invocation_metadata=())
    watched = boundary(limit, [] if heard is None else heard)
    handler = await watched.intercept_service(continuation, details)
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


async def test_whoever_counts_refusals_hears_of_each_wherever_it_comes_from() -> None:
    heard: Heard = []
    call = await handler_of_lengths(10, [], heard)
    for message in (bytes(11), b"?", b""):
        with pytest.raises(Refused):
            await call(message, Context())
    assert await call(b"12", Context()) == 2
    expected = ["MESSAGE_TOO_LARGE", "MESSAGE_UNDECODABLE", "PROMPT_EMPTY"]
    assert heard == [(CHECK, reason) for reason in expected]


async def test_method_that_nobody_wrote_is_heard_of() -> None:
    heard: Heard = []

    async def continuation(_details: object) -> None:
        return None

    details = SimpleNamespace(method="/some/Method", invocation_metadata=())
    handler = await boundary(10, heard).intercept_service(continuation, details)
    with pytest.raises(Refused):
        await handler.stream_stream(None, Context())
    assert heard == [("/some/Method", "METHOD_UNKNOWN")]
