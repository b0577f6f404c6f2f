"""The one place where a domain error becomes a gRPC status."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.errors import status_of

_log = logging.getLogger(__name__)


class DomainErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Maps DomainError to its status, and what nobody expected to INTERNAL with a fixed text."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wraps the handler of the call; the handlers of this project are all coroutines."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/splitserve."):
            return handler
        factory = _FACTORIES[(handler.request_streaming, handler.response_streaming)]
        inner = handler.stream_stream or handler.stream_unary
        inner = inner or handler.unary_stream or handler.unary_unary
        wrapped = _wrap_stream(inner) if handler.response_streaming else _wrap_unary(inner)
        return factory(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


_FACTORIES = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _wrap_unary(inner: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(request: object, context: grpc.aio.ServicerContext) -> object:
        try:
            return await inner(request, context)
        except (grpc.aio.AbortError, grpc.RpcError):
            raise
        except Exception as error:
            await _abort(context, error)

    return call


def _wrap_stream(inner: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in inner(request, context):
                yield response
        except (grpc.aio.AbortError, grpc.RpcError):
            raise
        except Exception as error:
            await _abort(context, error)

    return call


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    if not isinstance(error, DomainError):
        _log.error("unexpected_error", exc_info=error)
        error = DomainError("INVARIANT_BROKEN", "internal error; the server's log has the details")
    await context.abort_with_status(status_of(error))
    raise AssertionError("abort_with_status raises")
