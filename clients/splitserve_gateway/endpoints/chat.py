"""Chat completions endpoint, `POST /v1/chat/completions`: the next message of a chat."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.shapes import (
    AnswerKind,
    ChoiceAnswer,
    Json,
    TokenNames,
    chat_logprobs,
    check_streaming,
    prompt_logprobs,
)
from splitserve_gateway.generation import (
    ChatGeneration,
    ChoiceEnd,
    Delta,
    FieldNames,
    chat_fields,
    chat_generation,
    check_generates,
    generates,
    naming,
    sampling_params,
    tokenizer_of,
)
from splitserve_gateway.grammars import AnswerPlan
from splitserve_gateway.http import invalid
from splitserve_gateway.schemas import ChatRequest
from splitserve_text import (
    ContentDelta,
    Draw,
    ReasoningDelta,
    TokenLogprob,
    ToolCallArguments,
    ToolCallStart,
)
from splitserve_text import (
    Delta as Part,
)

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
    return ChoiceAnswer(_KIND, body, generation.request, _choices(body, generation))


async def start_chat(gateway: Gateway, body: ChatRequest, fields: FieldNames) -> ChatGeneration:
    """Chooses a scheduler and returns the generation of `body`. `fields`: the caller's field names.

    Raises ApiError and SplitserveError.
    """
    with naming(fields):
        serving = await gateway.choose(body.model, generates)
        check_generates(serving.served.model)
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
    request = generation.request
    names = TokenNames(tokenizer_of(request.served), as_ids=body.return_tokens_as_token_ids)
    prefix = generation.final_message if body.echo else ""
    (prompt,) = request.prompts
    return [
        ChatChoice(
            index,
            body,
            generation.plan,
            names,
            prompt.token_ids,
            prefix,
            request.origin.draw(index),
        )
        for index in range(request.params.num_completions)
    ]


def _check(body: ChatRequest) -> None:
    """Raises ApiError for fields that exclude each other."""
    if (body.messages is None) == (body.prompt_token_ids is None):
        raise invalid("one of messages and prompt_token_ids is required", "messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs requires logprobs to be true", "top_logprobs")
    check_streaming(body)


# -- Choices of a chat as JSON ---------------------------------------------------------------------


class ChatChoice:
    """Choice of a chat.

    `prefix`: text of the caller that the content begins with (`echo`). `draw`: chooses the
    characters of calls' ids.
    """

    def __init__(
        self,
        index: int,
        body: ChatRequest,
        plan: AnswerPlan,
        names: TokenNames,
        prompt_token_ids: Sequence[int] = (),
        prefix: str = "",
        draw: Draw = secrets.choice,
    ) -> None:
        self._index = index
        self._body = body
        self._names = names
        self._parser = plan.new_parser(draw) if plan.has_parts else None
        self._finding = plan.new_finding()
        self._prefix = prefix
        self._has_calls = False
        self._content: list[str] = [prefix] if prefix else []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Json] = []
        self._end: ChoiceEnd | None = None
        self._prompt_token_ids = prompt_token_ids
        self.prompt_scores: tuple[TokenLogprob, ...] = ()

    # -- streamed ----------------------------------------------------------------------------------

    def first_chunk(self) -> Json:
        """Returns the first event, with the role and the prefix."""
        return self._chunk({"role": "assistant", "content": self._prefix})

    def chunks(self, delta: Delta) -> list[Json]:
        """Returns the events for `delta`; empty if `delta` has nothing to report.

        Each has one call at most, as with OpenAI: some clients read only the first of an event.
        """
        shapes = self._shapes(self._parts(delta))
        logprobs = self._shape_logprobs(delta.logprobs)
        tells_ids = self._body.return_token_ids and delta.token_ids
        if not (shapes[0] or logprobs or delta.end or tells_ids):
            return []
        first, *others = shapes
        chunks = [self._chunk(first, logprobs), *map(self._chunk, others)]
        if delta.end is not None:
            chunks[-1]["finish_reason"] = self._reason(delta.end)
            chunks[-1]["stop_reason"] = delta.end.stop_reason
        if self._body.return_token_ids:
            chunks[0]["token_ids"] = delta.token_ids
        return chunks

    def _chunk(self, delta: Json, logprobs: Sequence[Json] = ()) -> Json:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": None,
        }

    def _shapes(self, parts: Sequence[Part]) -> list[Json]:
        """Merges `parts` into JSON deltas with a call each; one empty delta without parts."""
        if len(parts) == 1 and isinstance(part := parts[0], ContentDelta):
            return [{"content": part.text}]
        shape: Json = {}
        content = "".join([part.text for part in parts if isinstance(part, ContentDelta)])
        reasoning = "".join([part.text for part in parts if isinstance(part, ReasoningDelta)])
        if content:
            shape["content"] = content
        if reasoning:
            shape["reasoning_content"] = shape["reasoning"] = reasoning
        calls: list[Json] = [{"tool_calls": [call]} for call in _call_shapes(parts)]
        return [{**shape, **calls[0]}, *calls[1:]] if calls else [shape]

    # -- complete ----------------------------------------------------------------------------------

    def add(self, delta: Delta) -> None:
        """Adds `delta` to the complete choice."""
        for part in self._parts(delta):
            match part:
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ToolCallStart(_, call_id, name):
                    self._calls.append(_Call(call_id, name))
                case ToolCallArguments(index, text):
                    self._calls[index].arguments.append(text)
        self._logprobs.extend(self._shape_logprobs(delta.logprobs))
        self._token_ids.extend(delta.token_ids)
        self._end = delta.end or self._end

    def whole(self) -> Json:
        """Returns the complete choice as JSON."""
        content = "".join(self._content)
        message: Json = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [call.shape() for call in self._calls]
        choice: Json = {
            "index": self._index,
            "message": message,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._logprobs else None,
            "finish_reason": self._reason(self._end) if self._end else None,
            "stop_reason": self._end.stop_reason if self._end else None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = self._token_ids
        return choice

    def extra_fields(self) -> Json:
        """Returns the answer's fields about the prompt: logprobs and token ids."""
        shape: Json = {}
        if self._body.prompt_logprobs is not None:
            shape["prompt_logprobs"] = prompt_logprobs(self.prompt_scores, self._names)
        if self._body.return_token_ids:
            shape["prompt_token_ids"] = self._prompt_token_ids
        return shape

    # -- streamed and complete ---------------------------------------------------------------------

    async def end_fields(self) -> Json:
        """Returns what a check of the ended choice finds."""
        return await self._finding.fields()

    def _parts(self, delta: Delta) -> list[Part]:
        if self._parser is None:
            parts: list[Part] = [ContentDelta(delta.text)] if delta.text else []
        else:
            parts = self._parser.push(delta.text) if delta.text else []
            if delta.end is not None:
                parts += self._parser.finish()
        self._finding.add(parts)
        if not self._body.include_reasoning:
            parts = [part for part in parts if not isinstance(part, ReasoningDelta)]
        self._has_calls |= any(isinstance(part, ToolCallStart) for part in parts)
        return parts

    def _shape_logprobs(self, scores: Sequence[TokenLogprob]) -> list[Json]:
        return chat_logprobs(scores, self._names) if scores else []

    def _reason(self, end: ChoiceEnd) -> str:
        return "tool_calls" if self._has_calls and end.reason == "stop" else end.reason


class _Call:
    def __init__(self, call_id: str, name: str) -> None:
        self.call_id = call_id
        self.name = name
        self.arguments: list[str] = []

    def shape(self) -> Json:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.call_id, "type": "function", "function": function}


def _call_shapes(parts: Sequence[Part]) -> list[Json]:
    """Returns one JSON delta for each call."""
    shapes: dict[int, Json] = {}
    functions: dict[int, dict[str, str]] = {}
    for part in parts:
        match part:
            case ToolCallStart(index, call_id, name):
                functions[index] = {"name": name, "arguments": ""}
                shapes[index] = {"index": index, "id": call_id, "type": "function"}
            case ToolCallArguments(index, text):
                function = functions.setdefault(index, {"arguments": ""})
                function["arguments"] += text
                shapes.setdefault(index, {"index": index})
    return [{**shape, "function": functions[index]} for index, shape in shapes.items()]
