"""`POST /tokenize` and `POST /detokenize`: text to token ids and back, without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.shapes import with_notes
from splitserve_gateway.generation.answers import tools_of
from splitserve_gateway.generation.chat_prompts import encode_chat
from splitserve_gateway.generation.prompts import SMALL_SIZE, beside_the_loop, check_chars
from splitserve_gateway.generation.serving import tokenizer_of
from splitserve_gateway.http.errors import invalid, too_many_requests
from splitserve_gateway.schemas.tokenization import DetokenizeRequest, TokenizeRequest
from splitserve_gateway.sharing.turn_places import TooManyWait
from splitserve_gateway.upstreams.upstream import Served

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt or a chat."""
    gateway = gateway_of(request)
    async with gateway.reading(request, TokenizeRequest) as body:
        if (body.prompt is None) == (body.messages is None):
            raise invalid("one of prompt and messages is required", "prompt")
        served = (await gateway.choose(body.model)).served
        is_small = body.messages is None and len(body.prompt or "") <= SMALL_SIZE
        async with _turn(gateway, is_small):
            return await _tokenize(served, body)


async def _tokenize(served: Served, body: TokenizeRequest) -> Response:
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

    return await beside_the_loop(tokenizer, len(text) + len(token_ids or ()), answer)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids, with that of special tokens unless they are to be skipped."""
    gateway = gateway_of(request)
    async with gateway.reading(request, DetokenizeRequest) as body:
        served = (await gateway.choose(body.model)).served
        async with _turn(gateway, len(body.tokens) <= SMALL_SIZE):
            return await _detokenize(served, body)


async def _detokenize(served: Served, body: DetokenizeRequest) -> Response:
    tokenizer = tokenizer_of(served)
    vocab_size = served.model.vocab_size
    if body.tokens and max(body.tokens) >= vocab_size:
        message = f"tokens has {max(body.tokens)}; allowed: token ids below {vocab_size}"
        raise invalid(message, "tokens")

    def answer() -> Response:
        text = tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return Response(to_json({"prompt": text}), media_type="application/json")

    return await beside_the_loop(tokenizer, len(body.tokens), answer)


@asynccontextmanager
async def _turn(gateway: Gateway, is_small: bool) -> AsyncIterator[None]:
    """The turn of the caller's tenant in the tokenizer's threads; what is small needs none.

    Nobody who has one waits for schedulers.
    """
    if is_small:
        yield
        return
    try:
        async with gateway.tokenizing.place(gateway.caller.party):
            yield
    except TooManyWait as error:
        raise too_many_requests("too many texts wait for the tokenizer") from error
