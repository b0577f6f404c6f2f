"""The OpenAPI page: what bodies look like, which handlers read by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from splitserve_gateway.schemas.chat import ChatRequest
from splitserve_gateway.schemas.completions import CompletionRequest
from splitserve_gateway.schemas.responses import ResponsesRequest
from splitserve_gateway.schemas.tokenization import DetokenizeRequest, TokenizeRequest

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_REF = "#/components/schemas/{model}"


def openapi_of(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """What `app.openapi` is to be: the paths of `app`, with the bodies of requests."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = _with_bodies(page)
        return app.openapi_schema

    return openapi


def _with_bodies(page: dict[str, Any]) -> dict[str, Any]:
    models = [(model, "validation") for model in dict.fromkeys(_BODIES.values())]
    _, definitions = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
    page.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    for path, operations in page["paths"].items():
        for operation in operations.values():
            # What is refused has OpenAI's shape, and is never a 422.
            operation["responses"].pop("422", None)
            if path in _BODIES:
                schema = {"$ref": _REF.format(model=_BODIES[path].__name__)}
                content = {"application/json": {"schema": schema}}
                operation["requestBody"] = {"required": True, "content": content}
    return page
