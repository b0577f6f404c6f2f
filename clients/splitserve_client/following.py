"""Where a client goes on when its scheduler stops and names others.

What a scheduler says decides neither how a client is secured nor who gets its credential.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from splitserve_rpc.addresses import is_address, is_loopback
from splitserve_rpc.errors import MAX_NAMED

# One that stops may name one that stops, and so on.
MAX_HOPS = 4


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
        and (_host(each) == host or not has_credential or is_vouched)
        and (is_loopback(address) or not _is_local(each))
    ]


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_local(address: str) -> bool:
    try:
        return is_loopback(address) or ip_address(_host(address)).is_link_local
    except ValueError:
        return False
