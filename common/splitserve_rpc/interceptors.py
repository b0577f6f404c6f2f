"""Boundary of every server: decodes messages, checks access, and maps errors to statuses."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from splitserve_contract import DomainError
from splitserve_rpc.access import Access
from splitserve_rpc.errors import status_of

_log = logging.getLogger(__name__)

# grpc.aio has no types.
Method = Callable[..., Any]
Decode = Callable[..., Any]
Call = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]
Check = Callable[[grpc.aio.ServicerContext], None]
Tell = Callable[[grpc.aio.ServicerContext, DomainError], None]
# Arguments: method name, call, reason.
OnRefusal = Callable[[str, grpc.aio.ServicerContext, str], None]

# Everybody may call it, and an open call keeps its message.
_HEALTH = "/grpc.health.v1.Health/"
_MAX_HEALTH_BYTES = 1024


def ignore_refusal(method: str, context: grpc.aio.ServicerContext, reason: str) -> None:
    """Does nothing. Default of `on_refusal`."""


class BoundaryInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Decodes requests, and gives every error a status with ErrorInfo.

    gRPC itself decodes a message wherever it is read, answers undecodable bytes with UNKNOWN and a
    traceback, and leaves the generator of a stream to the garbage collector. So this class gives
    gRPC handlers of bytes. `access` is checked first. `message_limit`: returns the current maximum
    size in bytes, checked before decoding. Unexpected errors become INTERNAL with a fixed text.
    `on_refusal`: called for every call that ends with one of these errors.
    """

    def __init__(
        self,
        message_limit: Callable[[], int],
        access: Access,
        on_refusal: OnRefusal = ignore_refusal,
    ) -> None:
        self._message_limit = message_limit
        self._access = access
        self._on_refusal = on_refusal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wraps the handler of a call. All handlers must be coroutines or async generators."""
        name = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            refusal = DomainError("METHOD_UNKNOWN", f"unknown method {name}")
            return _refusing(refusal, partial(self._tell, name))
        try:
            self._access.check_metadata(name, handler_call_details.invocation_metadata or ())
        except DomainError as refusal:
            return _refusing(refusal, partial(self._tell, name))
        decode = partial(self._decode, name, handler.request_deserializer)
        method = handler.unary_unary or handler.unary_stream
        method = method or handler.stream_unary or handler.stream_stream
        answer = _answer_stream if handler.response_streaming else _answer_once
        receive = partial(_decoded, decode) if handler.request_streaming else decode
        factory = _FACTORIES[(handler.request_streaming, handler.response_streaming)]
        return factory(
            _guarded(
                partial(answer, method, receive),
                partial(self._access.check_peer, name),
                partial(self._tell, name),
            ),
            response_serializer=partial(_encode, handler.response_serializer),
        )

    def _tell(self, name: str, context: grpc.aio.ServicerContext, refusal: DomainError) -> None:
        self._on_refusal(name, context, refusal.reason)

    def _decode(self, name: str, deserialize: Decode, message: bytes) -> Any:  # noqa: ANN401
        limit = self._message_limit()
        if name.startswith(_HEALTH):
            limit = min(limit, _MAX_HEALTH_BYTES)
        if len(message) > limit:
            raise DomainError(
                "MESSAGE_TOO_LARGE",
                f"a message to {name} has {len(message)} bytes; allowed: at most {limit}",
            )
        try:
            return deserialize(message)
        except DecodeError:
            raise DomainError(
                "MESSAGE_UNDECODABLE",
                f"a message to {name} of {len(message)} bytes cannot be decoded",
            ) from None


_FACTORIES = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


async def _decoded(decode: Decode, messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for message in messages:
        yield decode(message)


def _encode(serialize: Callable[[Any], bytes], message: object) -> bytes:
    """Returns `message` unchanged if a servicer has already encoded it, else serializes it."""
    return message if isinstance(message, bytes) else serialize(message)


async def _answer_once(
    method: Method,
    receive: Decode,
    request: object,
    context: grpc.aio.ServicerContext,
) -> object:
    return await method(receive(request), context)


async def _answer_stream(
    method: Method,
    receive: Decode,
    request: object,
    context: grpc.aio.ServicerContext,
) -> None:
    if inspect.iscoroutinefunction(method):  # writes its responses itself
        await method(receive(request), context)
        return
    # The generator is closed before the call ends, even if the call ends during a write.
    async with aclosing(method(receive(request), context)) as responses:
        async for response in responses:
            await context.write(response)


def _refusing(refusal: DomainError, tell: Tell) -> grpc.RpcMethodHandler:
    """Returns a handler that raises `refusal` without reading a message."""

    async def refuse(request: object, context: grpc.aio.ServicerContext) -> NoReturn:
        raise refusal

    return grpc.stream_stream_rpc_method_handler(_guarded(refuse, None, tell))


def _guarded(call: Call, check: Check | None, tell: Tell) -> Call:
    async def guarded(request: object, context: grpc.aio.ServicerContext) -> object:
        try:
            if check is not None:
                check(context)
            return await call(request, context)
        except grpc.aio.BaseError:  # raised by gRPC: the call is over
            raise
        except DomainError as error:
            refusal = error
        except NotImplementedError:  # generated code: no implementation
            refusal = DomainError("METHOD_UNKNOWN", "this method is not implemented")
        except Exception:
            _log.exception("unexpected_error")
            text = "internal error; the server's log has the details"
            refusal = DomainError("INVARIANT_BROKEN", text)
        tell(context, refusal)
        return await context.abort_with_status(status_of(refusal))

    return guarded
