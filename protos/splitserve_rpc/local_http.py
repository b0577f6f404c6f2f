"""A connection to a gateway of this machine, to ask whether it is well."""

from __future__ import annotations

import ssl
from http.client import HTTPConnection, HTTPSConnection


def local_http(address: str, timeout_s: float, *, is_tls: bool) -> HTTPConnection:
    """To `address` (`host:port`); no proxy is between, and nothing secret may be sent."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not is_tls:
        return HTTPConnection(host, int(port), timeout=timeout_s)
    # Its certificate is for the name that clients know.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return HTTPSConnection(host, int(port), timeout=timeout_s, context=context)
