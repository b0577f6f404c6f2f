"""Small endpoints: models, health of the gateway, and tokenization."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitserve_client import Adapter, Model
from splitserve_gateway.endpoints.context import gateway_of
from splitserve_gateway.endpoints.shapes import with_notes
from splitserve_gateway.generation import (
    SMALL_SIZE,
    check_chars,
    encode_chat,
    run_off_loop,
    tokenizer_of,
    tools_of,
)
from splitserve_gateway.http import invalid, model_unknown
from splitserve_gateway.schemas import DetokenizeRequest, TokenizeRequest
from splitserve_gateway.upstreams import ServedByScheduler

# -- Models: `GET /v1/models` and `GET /v1/models/{id}` --------------------------------------------

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, object]:
    """Lists the models and adapters served now that the caller may use."""
    gateway = gateway_of(request)
    adapters = [_adapter_shape(*each) for each in await gateway.adapters()]
    return {"object": "list", "data": [*map(_shape, gateway.models), *adapters]}


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> dict[str, object]:
    """Returns one model or adapter that the caller may use."""
    gateway = gateway_of(request)
    models = {model.name: _shape(model) for model in gateway.models}
    if model_id not in models:
        for adapter, model in await gateway.adapters():
            models[adapter.name] = _adapter_shape(adapter, model)
    if model_id not in models:
        raise model_unknown(model_id, list(models))
    return models[model_id]


def _shape(model: Model) -> dict[str, object]:
    """Returns a model as JSON.

    `created` is 0, since it is unknown; `digest`: of the model's files.
    """
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


def _adapter_shape(adapter: Adapter, model: Model) -> dict[str, object]:
    """Returns an adapter of `model` as JSON."""
    own = {"root": adapter.path, "parent": model.name, "digest": adapter.digest}
    return {**_shape(model), "id": adapter.name, **own}


# -- Health: liveness and readiness of the gateway -------------------------------------------------


@router.get("/health/live")
async def live() -> dict[str, str]:
    """Answers 200 while the event loop runs."""
    return {"status": "live"}


@router.get("/health")
@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """Answers 200 while a scheduler takes requests and the gateway is not stopping, else 503.

    A 503 lists the readiness of each scheduler without its address, since anybody may ask.
    """
    gateway = gateway_of(request)
    if gateway.exchanges.is_draining:
        return JSONResponse({"status": "draining"}, 503)
    if not gateway.fleet.is_ready:
        words = gateway.fleet.readiness
        return JSONResponse({"status": "no scheduler is ready", "schedulers": words}, 503)
    return JSONResponse({"status": "ready"})


# -- Tokenization: `POST /tokenize`, `POST /detokenize`, `GET /tokenizer_info` ---------------------


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Returns the token ids of a prompt or a chat."""
    gateway = gateway_of(request)
    async with gateway.reading(request, TokenizeRequest) as body:
        if (body.prompt is None) == (body.messages is None):
            raise invalid("one of prompt and messages is required", "prompt")
        served = (await gateway.listed(body.model)).served
        is_small = body.messages is None and len(body.prompt or "") <= SMALL_SIZE
        async with gateway.tokenizer_turn(is_small=is_small):
            return await _tokenize(served, body)


async def _tokenize(served: ServedByScheduler, body: TokenizeRequest) -> Response:
    tokenizer = tokenizer_of(served)
    token_ids: list[int] | None = None
    if body.messages is not None:
        use = await tools_of(body)
        token_ids = (await encode_chat(body, served, use.template_tools)).token_ids
    text = body.prompt or ""
    check_chars("prompt", len(text), None, served)

    def answer() -> Response:
        adds = body.add_special_tokens is not False
        found = tokenizer.encode(text, add_special_tokens=adds) if token_ids is None else token_ids
        content = {
            "count": len(found),
            "max_model_len": served.model.max_model_len,
            "tokens": found,
            "token_strs": list(map(tokenizer.token_text, found))
            if body.return_token_strs
            else None,
        }
        return with_notes(Response(to_json(content), media_type="application/json"), body)

    return await run_off_loop(tokenizer, len(text) + len(token_ids or ()), answer)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Returns the text of token ids, with special tokens unless they are to be skipped."""
    gateway = gateway_of(request)
    async with gateway.reading(request, DetokenizeRequest) as body:
        served = (await gateway.listed(body.model)).served
        async with gateway.tokenizer_turn(is_small=len(body.tokens) <= SMALL_SIZE):
            return await _detokenize(served, body)


async def _detokenize(served: ServedByScheduler, body: DetokenizeRequest) -> Response:
    tokenizer = tokenizer_of(served)
    vocab_size = served.model.vocab_size
    if body.tokens and max(body.tokens) >= vocab_size:
        message = f"tokens has {max(body.tokens)}; allowed: token ids below {vocab_size}"
        raise invalid(message, "tokens")

    def answer() -> Response:
        text = tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return Response(to_json({"prompt": text}), media_type="application/json")

    return await run_off_loop(tokenizer, len(body.tokens), answer)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, str | None]:
    """Returns the special tokens by name, and the default chat template."""
    gateway = gateway_of(request)
    tokenizer = tokenizer_of((await gateway.listed(request.query_params.get("model"))).served)
    return {**tokenizer.named_tokens, "chat_template": tokenizer.chat_template}
