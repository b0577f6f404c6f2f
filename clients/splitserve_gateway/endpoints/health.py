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
    """200 while a scheduler is ready, 503 otherwise."""
    is_ready = bool(gateway_of(request).fleet.models)
    status = "ready" if is_ready else "no scheduler is ready"
    return JSONResponse({"status": status}, 200 if is_ready else 503)
