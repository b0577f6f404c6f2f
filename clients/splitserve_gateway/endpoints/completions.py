"""`POST /v1/completions`: text that continues a prompt."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from splitserve_gateway.endpoints.choice_answers import AnswerKind, ChoiceAnswer, check_streaming
from splitserve_gateway.endpoints.completion_choices import new_choices
from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.generation.answers import checked_grammar
from splitserve_gateway.generation.choices import TextRequest
from splitserve_gateway.generation.field_names import FieldNames, completion_fields, naming
from splitserve_gateway.generation.prompts import encode_prompts
from splitserve_gateway.generation.sampling import sampling_params
from splitserve_gateway.generation.text_requests import text_request
from splitserve_gateway.http.errors import invalid
from splitserve_gateway.schemas.completions import CompletionRequest

router = APIRouter()

_KIND = AnswerKind("cmpl", "text_completion", "text_completion", "logprobs")
_DEFAULT_MAX_TOKENS = 16
_MAX_CHOICES = 4096


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continues a prompt, or each of several."""
    gateway = gateway_of(request)
    async with gateway.reading(request, CompletionRequest) as body:
        answer = await _answer(gateway, body)
    return await answer.response()


async def _answer(gateway: Gateway, body: CompletionRequest) -> ChoiceAnswer:
    _check(body)
    fields = completion_fields(body)
    with naming(fields):
        asked = await _asked(gateway, body, fields)
    is_echo_alone = body.echo and body.max_tokens == 0
    return ChoiceAnswer(_KIND, body, asked, new_choices(body, asked), is_echo_alone)


async def _asked(gateway: Gateway, body: CompletionRequest, fields: FieldNames) -> TextRequest:
    serving = await gateway.choose(body.model)
    prompts = await encode_prompts(body, serving.served)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    num_prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        num_prompt_logprobs = max(body.logprobs, num_prompt_logprobs or 0)
    params = sampling_params(
        body,
        serving.served,
        # Nothing is computed without a token to be sampled; that of an echo alone is dropped.
        max_tokens=max(max_tokens, 1) if body.echo else max_tokens,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )
    params = replace(params, grammar=await checked_grammar(serving, body))
    if len(prompts) * params.num_completions > _MAX_CHOICES:
        message = f"{len(prompts)} prompts with n = {params.num_completions}; allowed: at most "
        raise invalid(f"{message}{_MAX_CHOICES} choices", "n")
    return await text_request(serving, body, params, prompts, fields)


def _check(body: CompletionRequest) -> None:
    """Raises ApiError for fields that do not go together."""
    if (body.prompt is None) == (body.prompt_token_ids is None):
        raise invalid("one of prompt and prompt_token_ids is required", "prompt")
    check_streaming(body)
