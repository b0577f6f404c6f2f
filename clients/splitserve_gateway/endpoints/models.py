"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from splitserve_client import Model
from splitserve_gateway.endpoints.context import gateway_of
from splitserve_gateway.http.errors import model_unknown

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, object]:
    """The models that are served now, of those that the caller may use."""
    return {"object": "list", "data": list(map(_shape, gateway_of(request).models))}


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> dict[str, object]:
    """One of them."""
    models = {model.name: model for model in gateway_of(request).models}
    if model_id not in models:
        raise model_unknown(model_id, list(models))
    return _shape(models[model_id])


def _shape(model: Model) -> dict[str, object]:
    """`created`: nobody knows. `digest`: of its files, as its schedulers say it."""
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "splitserve",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "digest": model.digest,
    }
