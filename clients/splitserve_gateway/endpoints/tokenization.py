"""`POST /tokenize` and `POST /detokenize`: text to token ids and back, without a model."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from splitserve_gateway.endpoints.context import gateway_of
from splitserve_gateway.endpoints.logprobs import TokenNames
from splitserve_gateway.generation.answers import tools_of
from splitserve_gateway.generation.chat_prompts import encode_chat
from splitserve_gateway.generation.prompts import beside_the_loop
from splitserve_gateway.generation.serving import tokenizer_of
from splitserve_gateway.http.errors import invalid
from splitserve_gateway.schemas.tokenization import DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, object]:
    """The token ids of a prompt or a chat."""
    gateway = gateway_of(request)
    body = await gateway.read(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("one of prompt and messages is required", "prompt")
    _, served = gateway.fleet.choose(body.model)
    tokenizer = tokenizer_of(served)
    prompt = body.prompt
    if prompt is None:
        use = await tools_of(body)
        token_ids = (await encode_chat(body, served, use.template_tools)).token_ids
    else:
        adds = body.add_special_tokens is not False
        token_ids = await beside_the_loop(
            len(prompt), lambda: tokenizer.encode(prompt, add_special_tokens=adds)
        )
    names = TokenNames(tokenizer)
    return {
        "count": len(token_ids),
        "max_model_len": served.model.max_model_len,
        "tokens": token_ids,
        "token_strs": list(map(names.name, token_ids)) if body.return_token_strs else None,
    }


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, str]:
    """The text of token ids, with that of special tokens unless they are to be skipped."""
    gateway = gateway_of(request)
    body = await gateway.read(request, DetokenizeRequest)
    _, served = gateway.fleet.choose(body.model)
    tokenizer = tokenizer_of(served)
    skip = body.skip_special_tokens
    text = await beside_the_loop(
        len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=skip)
    )
    return {"prompt": text}
