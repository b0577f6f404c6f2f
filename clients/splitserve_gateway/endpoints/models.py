"""`GET /v1/models`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from splitserve_gateway.endpoints.context import gateway_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, object]:
    """The models that are served now."""
    models = [
        {
            "id": model.name,
            "object": "model",
            "created": 0,
            "owned_by": "splitserve",
            "max_model_len": model.max_model_len,
        }
        for model in gateway_of(request).fleet.models
    ]
    return {"object": "list", "data": models}
