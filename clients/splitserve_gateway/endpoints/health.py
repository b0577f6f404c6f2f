"""Whether the gateway lives, and whether it can serve."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitserve_gateway.endpoints.context import gateway_of

router = APIRouter()


@router.get("/health/live")
async def live() -> dict[str, str]:
    """200 as long as the event loop turns."""
    return {"status": "live"}


@router.get("/health")
@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """200 while a scheduler takes requests and the gateway is not being stopped, 503 otherwise.

    Then it says a word of each scheduler, and not which one that is: anybody may ask.
    """
    gateway = gateway_of(request)
    if gateway.exchanges.is_draining:
        return JSONResponse({"status": "draining"}, 503)
    if not gateway.fleet.is_ready:
        words = gateway.fleet.readiness
        return JSONResponse({"status": "no scheduler is ready", "schedulers": words}, 503)
    return JSONResponse({"status": "ready"})
