"""Rules for following a stopping scheduler to the schedulers that it names.

A scheduler's message changes neither the client's security nor who gets its credential.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from splitserve_rpc.addresses import is_address, is_loopback
from splitserve_rpc.errors import MAX_NAMED

# A named scheduler may itself stop and name the next one.
MAX_HOPS = 4

# Resolvers read `127.1`, `2130706433` and `0x7f.1` as addresses: a name does not end in a number.
_NAME = re.compile(r"([a-z0-9_-]+\.)*(?!\d+$|0x[0-9a-f]*$)[a-z0-9_-]+")
# gRPC takes these words before a colon for resolver schemes: `unix:1` is a socket of this machine.
_SCHEMES = frozenset({"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p"})


def allowed(
    address: str, named: Sequence[str], *, has_credential: bool, is_vouched: bool
) -> list[str]:
    """Returns the addresses in `named`, sent by the scheduler at `address`, where a client may go.

    A client with a credential goes to other hosts only if `is_vouched`: their certificates are
    signed by the operator's own authority. A remote scheduler cannot name this machine.
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
    """Returns the host of an address in the form that resolvers see."""
    return address.rpartition(":")[0].strip("[]").lower().removesuffix(".")


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    """Parses an IP address; None: `host` is a name."""
    try:
        ip = ip_address(host)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def _is_plain(host: str) -> bool:
    """Returns whether `host` is unambiguously an IP address or a name.

    gRPC decodes what follows a `%`; zones occur only in addresses of this link.
    """
    if "%" in host:
        return False
    return _ip(host) is not None or (_NAME.fullmatch(host) is not None and host not in _SCHEMES)


def _is_local(host: str) -> bool:
    """Returns whether `host` is this machine or this link; names are not resolved."""
    ip = _ip(host)
    if ip is None:
        return host == "localhost" or host.endswith(".localhost")
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified
