"""Network addresses (`host:port`): their syntax, and sockets that listen with a clear error."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:,\[\]/]+):(?P<port>\d{1,5})")
MAX_PORT = 65535


class CannotListen(Exception):
    """Error: the address cannot be listened on. The message names the address and the reason."""


def claim_address(listen: str) -> str:
    """Checks that `listen` (`host:port`) is free, and replaces port 0. Raises CannotListen."""
    host, _, _ = listen.rpartition(":")
    with listen_at(listen) as probe:
        return f"{host}:{probe.getsockname()[1]}"


def listen_at(listen: str) -> socket.socket:
    """Returns a socket that listens at `listen` (`host:port`). Raises CannotListen."""
    host, _, port = listen.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise CannotListen(f"cannot listen on {listen}: unknown host {host}") from error
    family, kind, protocol, _, target = found[0]
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(target)
        listening.listen()
    except OSError as error:
        listening.close()
        problem = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise CannotListen(f"cannot listen on {listen}: {problem}") from error
    return listening


def is_address(text: str) -> bool:
    """Returns whether `text` has the form `host:port`."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and int(match["port"]) <= MAX_PORT


def is_reachable_address(text: str) -> bool:
    """Returns whether `text` has the form `host:port` with a port that can be dialled: not 0."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match["port"]) <= MAX_PORT


def is_loopback(address: str) -> bool:
    """Returns whether only this machine can reach a listener on `address` (`host:port`)."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def peer_host(peer: str) -> str:
    """Returns a gRPC peer without its port: `ipv4:127.0.0.1` of `ipv4:127.0.0.1:4711`.

    A peer has another port for each connection.
    """
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
