"""One channel to a scheduler: how it connects, and its calls with errors of this package."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve.scheduler.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from splitserve_client.errors import ServerUnreachable, SplitserveError, error_of_failure
from splitserve_client.resumption import RetryPolicy, Timing
from splitserve_rpc.cluster_identity import ClusterIdentity
from splitserve_rpc.errors import failure_of
from splitserve_rpc.server import channel_options

DEFAULT_ADDRESS = "127.0.0.1:50051"

_TOKENIZER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How patient a client is, and how it connects.

    `connect_timeout_s`: for the first connection and for short calls. `retry`: for streams that
    broke. `credentials`: None for plain text. `cluster_token`: for `list_executors`, if the server
    asks for one; nothing else is sent it.
    """

    connect_timeout_s: float = 5.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    credentials: grpc.ChannelCredentials | None = None
    cluster_token: str | None = field(default=None, repr=False)
    timing: Timing = field(default_factory=lambda: Timing(time.monotonic, asyncio.sleep))


class Connection:
    """The stubs of a scheduler's services, and how they are called. Raises SplitserveError."""

    def __init__(self, address: str, config: ClientConfig) -> None:
        self._unreachable = _unreachable(address, config)
        self._timeout_s = config.connect_timeout_s
        self._channel = _open_channel(address, config)
        self._has_connected = False
        self.scheduler = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._operator = ClusterIdentity(token=config.cluster_token)

    async def close(self) -> None:
        """Ends what runs."""
        await self._channel.close()

    @property
    def is_ready(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def connect(self) -> None:
        """Waits for the first connection. Raises ServerUnreachable as soon as it is refused."""
        if not self._has_connected:
            await _wait_for_connection(self._channel, self._unreachable, self._timeout_s)
            self._has_connected = True

    async def model(self) -> scheduler_pb2.GetModelResponse:
        """What is served. Raises ModelNotReady."""
        request = scheduler_pb2.GetModelRequest()
        response: scheduler_pb2.GetModelResponse
        response = await self.unary(self.scheduler.GetModel, request)
        return response

    async def is_serving(self) -> bool:
        """What the standard health service says of the server as a whole."""
        answer = await self.unary(self._health.Check, health_pb2.HealthCheckRequest())
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def max_message_bytes(self) -> float:
        """What the server takes; if it does not say, it is for the server to refuse."""
        try:
            return (await self.model()).max_message_bytes or math.inf
        except SplitserveError:
            return math.inf

    async def tokenizer_files(self) -> dict[str, bytes]:
        """By name. Raises ModelNotReady, TokenizerUnavailable."""
        files: dict[str, bytearray] = {}
        request = scheduler_pb2.GetTokenizerRequest()
        pieces = self.stream(self.scheduler.GetTokenizer, request, _TOKENIZER_TIMEOUT_S)
        async with aclosing(pieces):
            async for piece in pieces:
                files.setdefault(piece.file_name, bytearray()).extend(piece.data)
        return {name: bytes(data) for name, data in files.items()}

    async def abort(self, request_id: str) -> None:
        """Ends an unfinished request. Raises RequestUnknown."""
        request = scheduler_pb2.AbortRequest(request_id=request_id)
        await self.unary(self.scheduler.Abort, request)

    async def identify(self, credential: str) -> scheduler_pb2.IdentifyResponse:
        """Whose it is. Raises CallerUnknown."""
        request = scheduler_pb2.IdentifyRequest(credential=credential)
        response: scheduler_pb2.IdentifyResponse
        response = await self.unary(self.scheduler.Identify, request)
        return response

    async def executors(self) -> admin_pb2.ListExecutorsResponse:
        """What operators are told."""
        request = admin_pb2.ListExecutorsRequest()
        method = partial(self._admin.ListExecutors, metadata=self._operator.metadata)
        response: admin_pb2.ListExecutorsResponse = await self.unary(method, request)
        return response

    def session(
        self, requests: AsyncIterator[scheduler_pb2.SessionRequest]
    ) -> AsyncGenerator[scheduler_pb2.SessionResponse, None]:
        """A session's responses to `requests`."""
        return self.stream(self.scheduler.Session, requests)

    async def unary(self, method: Callable[..., Any], request: object) -> Any:  # noqa: ANN401
        """The answer to a short call."""
        await self.connect()
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of_failure(failure_of(error)) from error

    async def stream(
        self,
        method: Callable[..., Any],
        request: object,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Any, None]:
        """The responses of a call, which ends when this is closed."""
        await self.connect()
        call = method(request, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise error_of_failure(failure_of(error)) from error
        finally:
            call.cancel()


def _open_channel(address: str, config: ClientConfig) -> grpc.aio.Channel:
    """A channel that finds a server again soon after it is back."""
    options = [
        *channel_options(),
        # A server that is back is to be found at once, not after gRPC's patience of minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.min_reconnect_backoff_ms", int(config.connect_timeout_s * 1000)),
        ("grpc.dns_min_time_between_resolutions_ms", 500),
        ("grpc.enable_http_proxy", 0),
    ]
    if config.credentials is not None:
        return grpc.aio.secure_channel(address, config.credentials, options=options)
    return grpc.aio.insecure_channel(address, options=options)


def _unreachable(address: str, config: ClientConfig) -> str:
    """What is known when there is no connection: gRPC does not say whether somebody was there."""
    if config.credentials is None:
        return f"cannot connect to {address} in plain text: no server answers, or it wants TLS"
    wants = "it wants plain text, or another certificate"
    return f"cannot connect to {address} with TLS: no server answers, or {wants}"


async def _wait_for_connection(channel: grpc.aio.Channel, problem: str, timeout_s: float) -> None:
    """Raises ServerUnreachable as soon as the connection is refused, or after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    raise ServerUnreachable(problem)
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError as error:
        raise ServerUnreachable(f"{problem}; waited {timeout_s:g} s") from error
