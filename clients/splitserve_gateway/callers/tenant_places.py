"""Stands behind the door: how many of the gateway's places one tenant may have."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve_gateway.callers.caller import Caller
from splitserve_gateway.http.errors import too_many_requests
from splitserve_gateway.sharing.shares import Shares


class TenantPlaces:
    """The ASGI application around those that answer callers whom the door has let in."""

    def __init__(self, app: ASGIApp, places: Shares) -> None:
        self._app = app
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Holds a place of the caller's tenant, body and answer included. Raises ApiError: 429."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        if caller is None:
            await self._app(scope, receive, send)
            return
        tenant = caller.party
        if not self._places.may_take(tenant, 1):
            message = (
                f"the gateway answers {self._places.num_all} requests at a time, and "
                "leaves some to other tenants"
            )
            raise too_many_requests(message)
        self._places.take(tenant, 1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._places.give_back(tenant, 1)
