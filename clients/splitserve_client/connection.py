"""How a client connects, and how patient it is."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import grpc
import grpc.aio

from splitserve_client.errors import ServerUnreachable
from splitserve_client.resumption import RetryPolicy, Timing
from splitserve_rpc.server import channel_options

DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How patient a client is, and how it connects.

    `connect_timeout_s`: for the first connection and for short calls. `retry`: for streams that
    broke. `credentials`: None for plain text.
    """

    connect_timeout_s: float = 5.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    credentials: grpc.ChannelCredentials | None = None
    timing: Timing = field(default_factory=lambda: Timing(time.monotonic, asyncio.sleep))


def open_channel(address: str, config: ClientConfig) -> grpc.aio.Channel:
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


async def wait_for_connection(channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
    """Raises ServerUnreachable as soon as the connection is refused, or after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    raise ServerUnreachable(f"no server answers at {address}")
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError as error:
        raise ServerUnreachable(f"no server answers at {address} in time") from error
