"""By which names a server is asked that asks nobody for a credential."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class KnownHosts:
    """Answers who asks by an address, or by one of `names`.

    A page of elsewhere has a name; though that may lead here, the browser sends it along.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is allowed."""
        host = _without_port(Headers(scope=scope).get("host", ""))
        if scope["type"] != "http" or host in self._names or _is_address(host):
            await self._app(scope, receive, send)
            return
        names = ", ".join(sorted(self._names))
        message = f"host is {host[:80]!r}; allowed: an address, {names}"
        await JSONResponse({"reason": "", "message": message}, 400)(scope, receive, send)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def _is_address(host: str) -> bool:
    try:
        ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
