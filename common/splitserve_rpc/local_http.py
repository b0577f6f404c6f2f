"""HTTP connection to a gateway on this machine, for health checks."""

from __future__ import annotations

import ssl
from http.client import HTTPConnection, HTTPSConnection


def local_http(address: str, timeout_s: float, *, is_tls: bool) -> HTTPConnection:
    """Returns a connection to `address` (`host:port`) without a proxy.

    The certificate is not verified, so no secret may be sent.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not is_tls:
        return HTTPConnection(host, int(port), timeout=timeout_s)
    # The certificate has the name that clients use, not this address.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return HTTPSConnection(host, int(port), timeout=timeout_s, context=context)
