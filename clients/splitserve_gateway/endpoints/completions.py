"""`POST /v1/completions`: text that continues a prompt."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitserve_client import (
    End,
    Piece,
    Prompt,
    SamplingParams,
    SchedulingParams,
    TokenizerUnavailable,
    stream_text,
)
from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.http.event_stream import event_stream
from splitserve_gateway.schemas.completions import CompletionRequest

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continues a prompt."""
    gateway = gateway_of(request)
    body = await gateway.read(request, CompletionRequest)
    pieces = _generate(gateway, body)
    head: dict[str, object] = {
        "id": f"cmpl-{secrets.token_hex(16)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }
    if body.stream:
        return await event_stream(_chunks(head, pieces))
    return JSONResponse(await _whole(head, pieces))


async def _generate(gateway: Gateway, body: CompletionRequest) -> AsyncGenerator[Piece | End, None]:
    upstream, served = gateway.fleet.choose(body.model)
    if served.tokenizer is None:
        raise TokenizerUnavailable("this model comes without a tokenizer")
    params = SamplingParams(
        temperature=body.temperature, seed=body.seed, max_tokens=body.max_tokens
    ).with_defaults(served.model.default_sampling_params)
    prompt_token_ids = (
        served.tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    )
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    events = stream_text(
        upstream,
        served.tokenizer,
        Prompt(is_raw=True, token_ids=tuple(prompt_token_ids)),
        params,
        stop_strings=stops,
        scheduling=SchedulingParams(tenant=body.user),
    )
    async for event in events:
        yield event


async def _chunks(
    head: dict[str, object], events: AsyncGenerator[Piece | End, None]
) -> AsyncGenerator[object, None]:
    async for event in events:
        reason = event.reason.value if isinstance(event, End) else None
        text = event.text if isinstance(event, Piece) else ""
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        yield {**head, "choices": [choice]}


async def _whole(
    head: dict[str, object], events: AsyncGenerator[Piece | End, None]
) -> dict[str, object]:
    texts = []
    async for event in events:
        if isinstance(event, Piece):
            texts.append(event.text)
            continue
        choice = {
            "index": 0,
            "text": "".join(texts),
            "logprobs": None,
            "finish_reason": event.reason.value,
        }
        num_prompt, num_output = event.usage.num_prompt_tokens, event.usage.num_output_tokens
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }
        return {**head, "choices": [choice], "usage": usage}
    raise AssertionError("the last event is an End")
