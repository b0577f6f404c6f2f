"""Stands before every endpoint: without a credential that schedulers know nothing is answered."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve_gateway.callers.credential import credential_of
from splitserve_gateway.callers.known_callers import KnownCallers
from splitserve_gateway.http.address import origin_of
from splitserve_gateway.http.errors import caller_not_allowed
from splitserve_gateway.http.guard import is_about_health


class Door:
    """The ASGI application around those that may know who calls."""

    def __init__(self, app: ASGIApp, callers: Callable[[], KnownCallers]) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on a request of a known caller, before anything of its body is read.

        Raises ApiError.
        """
        if scope["type"] == "http" and not is_about_health(scope["path"]):
            credential = credential_of(scope["headers"])
            origin = origin_of(scope.get("client"))
            caller = await self._callers().identify(credential, origin)
            if not caller.may_generate:
                message = "the credential is not for requests: its scopes lack `generate`"
                raise caller_not_allowed(message)
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)
