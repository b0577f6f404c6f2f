"""From where a request comes, as far as floods are told apart by it."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

# Whoever has one address of IPv6 has as many as this leaves open.
_IPV6_PREFIX_BITS = 64


def origin_of(client: Sequence[object] | None) -> str:
    """The address of an ASGI `client`, or its network; empty if there is none."""
    host = str(client[0]) if client else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(address.packed[: _IPV6_PREFIX_BITS // 8].hex())
    return str(address)
