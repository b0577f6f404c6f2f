"""Where a client goes on when its scheduler stops and names others.

What a scheduler says decides neither how a client is secured nor who gets its credential.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from splitserve_rpc.addresses import is_address, is_loopback
from splitserve_rpc.errors import MAX_NAMED

# One that stops may name one that stops, and so on.
MAX_HOPS = 4

# Resolvers read `127.1`, `2130706433` and `0x7f.1` as addresses: a name does not end in a number.
_NAME = re.compile(r"([a-z0-9_-]+\.)*(?!\d+$|0x[0-9a-f]*$)[a-z0-9_-]+")
# Before a colon gRPC takes these for ways to find an address: `unix:1` is a socket of this machine.
_SCHEMES = frozenset({"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p"})


def allowed(
    address: str, named: Sequence[str], *, has_credential: bool, is_vouched: bool
) -> list[str]:
    """Those of `named`, which the scheduler at `address` said, where a client may go.

    With a credential these are other hosts only if `is_vouched`: an authority of the operator's own
    has to certify them. Nobody sends us to our own machine, but for whoever is there.
    """
    host = _host(address)
    return [
        each
        for each in dict.fromkeys(named[:MAX_NAMED])
        if is_address(each)
        and _is_plain(_host(each))
        and (_host(each) == host or not has_credential or is_vouched)
        and (is_loopback(address) or not _is_local(_host(each)))
    ]


def _host(address: str) -> str:
    """As whoever resolves it sees it."""
    return address.rpartition(":")[0].strip("[]").lower().removesuffix(".")


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    """None: it is no IP address."""
    try:
        ip = ip_address(host)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def _is_plain(host: str) -> bool:
    """Whether it is an IP address or a name, and nobody takes it for anything else.

    gRPC decodes what follows a `%`; zones have only addresses of this link.
    """
    if "%" in host:
        return False
    return _ip(host) is not None or (_NAME.fullmatch(host) is not None and host not in _SCHEMES)


def _is_local(host: str) -> bool:
    """Whether it is this machine or this link; what names resolve to is not looked at."""
    ip = _ip(host)
    if ip is None:
        return host == "localhost" or host.endswith(".localhost")
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified
