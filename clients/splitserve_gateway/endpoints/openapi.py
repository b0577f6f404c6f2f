"""OpenAPI description with the bodies and errors that handlers process themselves; docs page."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from splitserve_gateway.http import ErrorFormat, is_about_health
from splitserve_gateway.schemas import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    MessagesRequest,
    PoolingRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
    TranscriptionRequest,
    TranslationRequest,
    UnloadAdapterRequest,
)

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/v1/score": ScoreRequest,
    "/score": ScoreRequest,
    "/v1/classify": ClassifyRequest,
    "/classify": ClassifyRequest,
    "/pooling": PoolingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
}
# Forms with a file.
_FORMS: dict[str, type[BaseModel]] = {
    "/v1/audio/transcriptions": TranscriptionRequest,
    "/v1/audio/translations": TranslationRequest,
}
_FILE = {"type": "string", "format": "binary"}
_REF = "#/components/schemas/{model}"
_ERROR = "Error"
_ANTHROPIC_ERROR = "AnthropicError"
_CREDENTIAL = "bearerAuth"
_KEY = "apiKeyAuth"
_NULLABLE_TEXT = {"type": ["string", "null"]}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_TEXT,
                "code": _NULLABLE_TEXT,
            },
        }
    },
}
_ANTHROPIC_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "details"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {
                    "type": "object",
                    "required": ["error_code", "param"],
                    "properties": {"error_code": _NULLABLE_TEXT, "param": _NULLABLE_TEXT},
                },
            },
        },
        "request_id": {"type": "string"},
    },
}
_ERRORS = {
    "401": "The credential is missing or invalid.",
    "403": "The credential does not permit the request.",
    "404": "The model does not exist.",
    "429": "Too many requests; retry after Retry-After.",
    "500": "Internal error.",
    "503": "No scheduler is ready; retry after Retry-After.",
}
# Further errors of endpoints with a body.
_BODY_ERRORS = {
    "400": "The request is invalid.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "504": "The request exceeded its time limit.",
}
_PAGE = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body><h1>{title}</h1>
<p>Full description: <a href="openapi.json">openapi.json</a></p>
<table>
{rows}
</table></body></html>
"""
_ROW = "<tr><td>{method}</td><td><code>{path}</code></td><td>{what}</td></tr>"


def openapi_of(app: FastAPI, *, knows_callers: bool) -> Callable[[], dict[str, Any]]:
    """Returns a function for `app.openapi`: the paths of `app` with request bodies and errors.

    `knows_callers`: whether callers need a credential.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = _with_bodies(page)
            if knows_callers:
                _need_credentials(page)
        return app.openapi_schema

    return openapi


def _with_bodies(page: dict[str, Any]) -> dict[str, Any]:
    models = [
        (model, "validation") for model in dict.fromkeys((*_BODIES.values(), *_FORMS.values()))
    ]
    _, definitions = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
    for form in dict.fromkeys(_FORMS.values()):
        described = definitions["$defs"][form.__name__]
        described["properties"]["file"] = _FILE
        described["required"] = ["file"]
    errors = {_ERROR: _ERROR_SCHEMA, _ANTHROPIC_ERROR: _ANTHROPIC_ERROR_SCHEMA}
    page["components"] = {"schemas": {**definitions["$defs"], **errors}}
    for path, operations in page["paths"].items():
        for operation in operations.values():
            # Refusals have a client's format and never the status 422 of FastAPI.
            operation["responses"].pop("422", None)
            operation["responses"].update(_errors(path))
            if path in _BODIES:
                schema = {"$ref": _REF.format(model=_BODIES[path].__name__)}
                content = {"application/json": {"schema": schema}}
                operation["requestBody"] = {"required": True, "content": content}
            if path in _FORMS:
                schema = {"$ref": _REF.format(model=_FORMS[path].__name__)}
                content = {"multipart/form-data": {"schema": schema}}
                operation["requestBody"] = {"required": True, "content": content}
    return page


def _need_credentials(page: dict[str, Any]) -> None:
    scheme = {"type": "http", "scheme": "bearer", "description": "An API key or a JWT."}
    key = {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same."}
    page["components"]["securitySchemes"] = {_CREDENTIAL: scheme, _KEY: key}
    page["security"] = [{_CREDENTIAL: []}, {_KEY: []}]
    for path, operations in page["paths"].items():
        if is_about_health(path):
            for operation in operations.values():
                operation["security"] = []


def _errors(path: str) -> dict[str, object]:
    if is_about_health(path):
        return {}
    meanings = {**_ERRORS, **(_BODY_ERRORS if path in _BODIES or path in _FORMS else {})}
    is_anthropic = ErrorFormat.of(path) is ErrorFormat.ANTHROPIC
    model = _ANTHROPIC_ERROR if is_anthropic else _ERROR
    content = {"application/json": {"schema": {"$ref": _REF.format(model=model)}}}
    return {
        status: {"description": meaning, "content": content} for status, meaning in meanings.items()
    }


async def docs_page(request: Request) -> Response:
    """Returns an HTML list of the paths. The page loads no scripts."""
    page = request.app.openapi()
    rows = [
        _ROW.format(
            method=method.upper(), path=escape(path), what=escape(operation.get("description", ""))
        )
        for path, operations in page["paths"].items()
        for method, operation in operations.items()
    ]
    text = _PAGE.format(title=escape(page["info"]["title"]), rows="\n".join(rows))
    return HTMLResponse(text, headers={"content-security-policy": "default-src 'none'"})
