"""`POST /v1/chat/completions`: the next message of a chat."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from splitserve_gateway.endpoints.chat_choices import ChatChoice
from splitserve_gateway.endpoints.choice_answers import AnswerKind, ChoiceAnswer, check_streaming
from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.logprobs import TokenNames
from splitserve_gateway.generation.chat_requests import ChatGeneration, chat_generation
from splitserve_gateway.generation.field_names import FieldNames, chat_fields, naming
from splitserve_gateway.generation.sampling import sampling_params
from splitserve_gateway.generation.serving import tokenizer_of
from splitserve_gateway.http.errors import invalid
from splitserve_gateway.schemas.chat import ChatRequest

router = APIRouter()

_KIND = AnswerKind("chatcmpl", "chat.completion", "chat.completion.chunk", "top_logprobs")


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answers a chat."""
    gateway = gateway_of(request)
    async with gateway.reading(request, ChatRequest) as body:
        answer = await _answer(gateway, body)
    return await answer.response()


async def _answer(gateway: Gateway, body: ChatRequest) -> ChoiceAnswer:
    _check(body)
    generation = await start_chat(gateway, body, chat_fields(body))
    return ChoiceAnswer(_KIND, body, generation.asked, _choices(body, generation))


async def start_chat(gateway: Gateway, body: ChatRequest, fields: FieldNames) -> ChatGeneration:
    """The generation that `body` asks for; `fields`: what its caller calls them.

    Raises ApiError and SplitserveError.
    """
    with naming(fields):
        serving = await gateway.choose(body.model)
        max_tokens = body.max_tokens
        if body.max_completion_tokens is not None:
            max_tokens = body.max_completion_tokens
        params = sampling_params(
            body,
            serving.served,
            max_tokens=max_tokens,
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            num_prompt_logprobs=body.prompt_logprobs,
        )
        return await chat_generation(serving, body, params, fields)


def _choices(body: ChatRequest, generation: ChatGeneration) -> list[ChatChoice]:
    asked = generation.asked
    names = TokenNames(tokenizer_of(asked.served), as_ids=body.return_tokens_as_token_ids)
    prefix = generation.final_message if body.echo else ""
    (prompt,) = asked.prompts
    return [
        ChatChoice(index, body, generation.plan, names, prompt.token_ids, prefix)
        for index in range(asked.params.num_completions)
    ]


def _check(body: ChatRequest) -> None:
    """Raises ApiError for fields that do not go together."""
    if (body.messages is None) == (body.prompt_token_ids is None):
        raise invalid("one of messages and prompt_token_ids is required", "messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    check_streaming(body)
