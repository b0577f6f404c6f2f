"""Addresses: what one is, and why one cannot be listened on, before gRPC says so vaguely."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:,\[\]/]+):(?P<port>\d{1,5})")
MAX_PORT = 65535


class CannotListen(Exception):
    """The address cannot be listened on; the message names it and says why."""


def claim_address(listen: str) -> str:
    """`listen` (`host:port`), with a free port instead of port 0. Raises CannotListen."""
    host, _, _ = listen.rpartition(":")
    with listen_at(listen) as probe:
        return f"{host}:{probe.getsockname()[1]}"


def listen_at(listen: str) -> socket.socket:
    """A socket that listens at `listen` (`host:port`). Raises CannotListen."""
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
    """Whether it is `host:port`."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and int(match["port"]) <= MAX_PORT


def is_reachable_address(text: str) -> bool:
    """Whether it is `host:port` of something that can be dialled: not of port 0."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match["port"]) <= MAX_PORT


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches what listens on `address` (`host:port`)."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def peer_host(peer: str) -> str:
    """A peer without its port, another for each connection: `ipv4:127.0.0.1` of `...:4711`."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
