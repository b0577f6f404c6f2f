"""Guard of HTTP listeners that know no callers: refuses web pages of other origins.

A browser sends requests for any page that it shows, also to addresses that only its own machine
reaches. A listener without credentials therefore checks three headers that pages cannot forge:

- `Host`: a page whose name was pointed at this address (DNS rebinding) sends that name.
- `Sec-Fetch-Site` and `Origin`: say which page a request is from. Programs send neither.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from ipaddress import ip_address

ANY = "*"
_SUBDOMAINS = "*."
# Reserved names (RFC 6761, RFC 6762, ICANN 2024). The public DNS has none, so no page has one.
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal")
_MAX_QUOTED_CHARS = 80


def split_hosts(text: str | None) -> tuple[str, ...]:
    """Returns the names in a value of the option `allowed-hosts`."""
    return tuple(text.split(",")) if text else ()


@dataclass(frozen=True, slots=True)
class WebRefusal:
    """Refusal of an HTTP request. `status`: HTTP status. `code`: reason for programs."""

    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class WebGuard:
    """Checks the headers of a request. Programs outside browsers always pass the origin check.

    `hosts`: allowed `Host` names, in addition to addresses and names that the public DNS cannot
    have; `*.example.org` allows any name below that one, `*` any name. `origins`: allowed pages, as
    `Origin` names them; `*` for all.
    """

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()

    def refusal(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> WebRefusal | None:
        """Returns the refusal, or None if the request may pass. `headers`: names in lower case."""
        fields = _Fields(headers)
        for host in fields.all(b"host"):
            if not self._allows_host(host):
                return self._host_refusal(host)
        if self._allows_origin(method, fields):
            return None
        return self._origin_refusal(fields)

    def _allows_host(self, host: str) -> bool:
        name = _without_port(host.lower()).removesuffix(".")
        if ANY in self.hosts or _is_private(name):
            return True
        return any(
            name.endswith(allowed[1:]) if allowed.startswith(_SUBDOMAINS) else name == allowed
            for allowed in map(str.lower, self.hosts)
        )

    def _allows_origin(self, method: str, fields: _Fields) -> bool:
        origins, sites = fields.all(b"origin"), fields.all(b"sec-fetch-site")
        if ANY in self.origins or (origins and set(origins) <= set(self.origins)):
            return True
        if sites:
            # The browser has already compared the origins. `none`: the user typed the address.
            return set(sites) <= {"same-origin", "none"} or _is_followed_link(method, fields)
        own = {host.lower() for host in fields.all(b"host")}
        return all(origin.lower().partition("://")[2] in own for origin in origins)

    def _host_refusal(self, host: str) -> WebRefusal:
        names = "".join(f", {name}" for name in self.hosts if not _is_private(name))
        message = (
            f"host is {host[:_MAX_QUOTED_CHARS]!r}; allowed: an IP address, a name without a dot "
            f"or of .internal, .local, .localhost{names}; --allowed-hosts allows more"
        )
        return WebRefusal(400, "host_not_allowed", message)

    def _origin_refusal(self, fields: _Fields) -> WebRefusal:
        header = b"origin" if fields.all(b"origin") else b"sec-fetch-site"
        value = ", ".join(fields.all(header))[:_MAX_QUOTED_CHARS]
        origins = "".join(f", {origin}" for origin in self.origins)
        message = (
            f"{header.decode()} is {value!r}: the request is from a web page of another origin; "
            f"allowed: pages of this address{origins} (--http-cors-origins allows more for the API)"
        )
        return WebRefusal(403, "origin_not_allowed", message)


class _Fields:
    """Header fields that the guard reads."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._headers = [
            (name, value)
            for name, value in headers
            if name in (b"host", b"origin") or name.startswith(b"sec-fetch-")
        ]

    def all(self, wanted: bytes) -> list[str]:
        """Returns the values of all fields with the name `wanted`."""
        return [value.decode("latin-1").strip() for name, value in self._headers if name == wanted]


def _is_followed_link(method: str, fields: _Fields) -> bool:
    """Returns whether the user follows a link on another page, which cannot read the response."""
    return (
        method in ("GET", "HEAD")
        and fields.all(b"sec-fetch-mode") == ["navigate"]
        and fields.all(b"sec-fetch-dest") == ["document"]
    )


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def _is_private(name: str) -> bool:
    """Returns whether no page of the public internet can have the host `name`."""
    if not name:
        return False
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return "." not in name or name.endswith(_PRIVATE_SUFFIXES)
    return True


# -- HTTP connection to a gateway on this machine, for health checks -------------------------------


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
