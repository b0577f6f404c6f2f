"""Network addresses (`host:port`): their syntax, and sockets that listen with a clear error."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

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


# -- Rules for the addresses that a peer may tell this process to dial -----------------------------

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAME = re.compile(r"[A-Za-z0-9_*?][A-Za-z0-9_*?.-]{0,252}")
# Metadata services of clouds, which give out secrets. 169.254.169.254 is covered as link-local.
_METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200")))


def read_ip(text: str) -> IpAddress:
    """Parses an IP address; an IPv4-mapped IPv6 address becomes IPv4. Raises ValueError."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


@dataclass(frozen=True, slots=True)
class AddressRules:
    """Allowed addresses.

    Without names and networks, only the address of the asking peer is allowed. `names`: shell
    patterns of host names, in lower case. `networks`: IP networks.
    """

    names: tuple[str, ...] = ()
    networks: tuple[_Network, ...] = ()

    @classmethod
    def parse(cls, text: str) -> AddressRules:
        """Parses a list such as `10.0.0.0/8,*.example.org`. Raises ValueError."""
        names: list[str] = []
        networks: list[_Network] = []
        for part in (part.strip() for part in text.split(",")):
            try:
                networks.append(ipaddress.ip_network(part))
            except ValueError as error:
                # 10.0.0.1/8 and 999.0.0.1 are mistakes, not names.
                if not _NAME.fullmatch(part) or re.fullmatch(r"[\d.]+", part):
                    raise ValueError(
                        f"{part!r} is invalid; allowed: networks (10.0.0.0/8), addresses and names"
                        " (*.example.org), separated by commas"
                    ) from error
                names.append(part.lower())
        return cls(tuple(names), tuple(networks))

    def allows(self, host: str, address: IpAddress, asking: IpAddress | None) -> bool:
        """Returns whether `address`, resolved from `host`, may be dialled.

        `asking`: address of the peer that asked; None for this machine.
        """
        if address.is_unspecified or address.is_multicast:
            return False
        if address.is_loopback and (asking is None or asking.is_loopback):
            is_near = True
        else:
            is_near = address == asking
        if not self.names and not self.networks:
            return is_near and not address.is_link_local
        around = [network for network in self.networks if address in network]
        if address.is_loopback or address.is_link_local or address in _METADATA:
            # A rule for all addresses, or for a name, is hardly meant to include these.
            meant = any(_is_about_itself(network) for network in around)
            return meant or (bool(around) and address.is_loopback and is_near)
        name = host.lower().rstrip(".")
        return bool(around) or any(fnmatchcase(name, pattern) for pattern in self.names)

    def __str__(self) -> str:
        """Returns the allowed addresses as text for people."""
        if not self.names and not self.networks:
            return "the address that it registers from"
        return ",".join((*map(str, self.networks), *self.names))


def _is_about_itself(network: _Network) -> bool:
    return network.is_loopback or network.is_link_local or network.num_addresses == 1


# -- Messages about addresses that other machines can reach without protection ---------------------


def exposed(option: str, address: object, problem: str) -> str:
    """Returns the error message for a listener at `address` that other machines could reach."""
    return (
        f"--{option} {address}: other machines can reach it, and {problem} (docs/security.md); "
        "--insecure allows it"
    )


def missing_for_http(*, is_encrypted: bool, knows_clients: bool) -> str:
    """Returns as text the options without which HTTP stays local; empty if none is missing."""
    missing = []
    if not is_encrypted:
        missing.append("without --http-tls-cert and --http-tls-key it is not encrypted")
    if not knows_clients:
        missing.append(
            "without --gateway-key-file or --http-tls-client-ca it does not authenticate callers"
        )
    return ", and ".join(missing)
