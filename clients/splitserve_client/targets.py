"""Target of a client's calls, and the options of its channels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import grpc.aio

from splitserve_client.channels import Channels, Credentials
from splitserve_client.client_config import ClientConfig
from splitserve_client.errors import ServerUnreachable
from splitserve_client.plain_text import warn_of_plain_text
from splitserve_client.schedulers import Schedulers, Target
from splitserve_rpc.addresses import MAX_PORT
from splitserve_rpc.discovery import discovery, names_several
from splitserve_rpc.files import FilesUnusable
from splitserve_rpc.server import channel_options

_MAX_PORT_DIGITS = 20


def open_target(address: str, config: ClientConfig) -> Target:
    """Returns the target for `address`. Raises CredentialsUnusable and ServerUnreachable."""
    port = address.rpartition(":")[2]
    # gRPC would use the port modulo 65536.
    if port.isdecimal() and (len(port) > _MAX_PORT_DIGITS or int(port) > MAX_PORT):
        problem = f"its port is above {MAX_PORT}"
        raise ServerUnreachable(f"the address {address[:100]!r} cannot be used: {problem}")
    if not names_several(address):
        return open_channels(config, address)
    try:
        found = discovery(address)
    except (ValueError, FilesUnusable) as error:
        raise ServerUnreachable(f"the address {address!r} cannot be used: {error}") from error
    config.open_credentials()  # reports unusable credentials now
    config = replace(config, tls_name=found.host or config.tls_name)
    return Schedulers(found, partial(open_channels, config), config.timing.clock)


def open_channels(config: ClientConfig, address: str) -> Channels:
    """Opens the channel to one address. Raises CredentialsUnusable."""
    if config.has_api_key and config.is_plain_text:
        warn_of_plain_text(address)
    open_channel = partial(_open_channel, address, config)
    return Channels(open_channel, config.open_credentials(), _unreachable(address, config))


def _open_channel(address: str, config: ClientConfig, credentials: Credentials) -> grpc.aio.Channel:
    """Opens a channel that reconnects soon after the server is back."""
    options: list[tuple[str, int | str]] = [
        *channel_options(),
        # gRPC's default backoff grows to minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.min_reconnect_backoff_ms", int(config.connect_timeout_s * 1000)),
        ("grpc.dns_min_time_between_resolutions_ms", 500),
        ("grpc.enable_http_proxy", 0),
        # Otherwise a replacement channel would share the abandoned connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if credentials is not None:
        if config.tls_name is not None:
            options.append(("grpc.ssl_target_name_override", config.tls_name))
        return grpc.aio.secure_channel(address, credentials, options=options)
    return grpc.aio.insecure_channel(address, options=options)


def _unreachable(address: str, config: ClientConfig) -> str:
    """Returns the start of the message for a failed connection; gRPC's reason follows."""
    if config.is_plain_text:
        return f"cannot connect to {address} in plain text: no server answers, or it wants TLS"
    wants = "it wants plain text, or another certificate"
    return f"cannot connect to {address} with TLS: no server answers, or {wants}"
