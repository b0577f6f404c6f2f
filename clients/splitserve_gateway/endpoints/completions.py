"""Completions endpoint, `POST /v1/completions`: text that continues a prompt."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.shapes import (
    AnswerKind,
    ChoiceAnswer,
    CompletionLogprobs,
    Json,
    TokenNames,
    check_streaming,
    joined,
    prompt_logprobs,
)
from splitserve_gateway.generation import (
    ChoiceEnd,
    Delta,
    EncodedPrompt,
    FieldNames,
    TextRequest,
    check_generates,
    completion_fields,
    completion_plan,
    encode_prompts,
    generates,
    naming,
    sampling_params,
    text_request,
)
from splitserve_gateway.grammars import AnswerFinding, AnswerPlan
from splitserve_gateway.http import invalid
from splitserve_gateway.schemas import CompletionRequest
from splitserve_text import (
    ContentDelta,
    TokenLogprob,
)

router = APIRouter()

_KIND = AnswerKind("cmpl", "text_completion", "text_completion", "logprobs")
_DEFAULT_MAX_TOKENS = 16
_MAX_CHOICES = 4096


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continues a prompt, or each prompt of a batch."""
    gateway = gateway_of(request)
    async with gateway.reading(request, CompletionRequest) as body:
        answer = await _answer(gateway, body)
    return await answer.response()


async def _answer(gateway: Gateway, body: CompletionRequest) -> ChoiceAnswer:
    _check(body)
    fields = completion_fields(body)
    with naming(fields):
        request, plan = await _text_request(gateway, body, fields)
    is_echo_alone = body.echo and body.max_tokens == 0
    return ChoiceAnswer(_KIND, body, request, new_choices(body, request, plan), is_echo_alone)


async def _text_request(
    gateway: Gateway, body: CompletionRequest, fields: FieldNames
) -> tuple[TextRequest, AnswerPlan]:
    serving = await gateway.choose(body.model, generates)
    check_generates(serving.served.model)
    prompts = await encode_prompts(body, serving.served)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    num_prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        num_prompt_logprobs = max(body.logprobs, num_prompt_logprobs or 0)
    params = sampling_params(
        body,
        serving.served,
        # A request samples at least one token; a mere echo drops that token.
        max_tokens=max(max_tokens, 1) if body.echo else max_tokens,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )
    plan = await completion_plan(serving, body)
    params = replace(params, grammar=plan.grammar)
    if len(prompts) * params.num_completions > _MAX_CHOICES:
        message = f"{len(prompts)} prompts with n = {params.num_completions}; allowed: at most "
        raise invalid(f"{message}{_MAX_CHOICES} choices", "n")
    return await text_request(serving, body, params, prompts, fields), plan


def _check(body: CompletionRequest) -> None:
    """Raises ApiError for fields that exclude each other."""
    if (body.prompt is None) == (body.prompt_token_ids is None):
        raise invalid("one of prompt and prompt_token_ids is required", "prompt")
    check_streaming(body)


# -- Choices of a completion as JSON ---------------------------------------------------------------


def new_choices(
    body: CompletionRequest, request: TextRequest, plan: AnswerPlan
) -> list[CompletionChoice]:
    """Returns the empty choices of all prompts, prompt by prompt."""
    names = TokenNames(request.served.tokenizer, as_ids=body.return_tokens_as_token_ids)
    tells_ids = body.return_token_ids or request.served.tokenizer is None
    num_each = request.params.num_completions
    choices: list[CompletionChoice] = []
    for prompt in request.prompts:
        logprobs = _logprobs(body, request, prompt, names)
        for _ in range(num_each):
            own = None if logprobs is None else logprobs.fork()
            choice = CompletionChoice(len(choices), body, prompt, names, own, tells_ids)
            choice.finding = plan.new_finding()
            choices.append(choice)
    return choices


class CompletionChoice:
    """Choice of a completion. `tells_ids`: the JSON has token ids in addition to the text.

    `finding`: check of the text; nothing is checked until it is set.
    """

    def __init__(
        self,
        index: int,
        body: CompletionRequest,
        prompt: EncodedPrompt,
        names: TokenNames,
        logprobs: CompletionLogprobs | None,
        tells_ids: bool,
    ) -> None:
        self._index = index
        self._body = body
        self._prompt = prompt
        self._names = names
        self._has_started = False
        self._logprobs = logprobs
        self._tells_ids = tells_ids
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._shapes: list[dict[str, list[object]]] = []
        self._end: ChoiceEnd | None = None
        self.prompt_scores: tuple[TokenLogprob, ...] = ()
        self.finding = AnswerFinding(None)

    def first_chunk(self) -> None:
        """Returns None: a completion's stream has no first event without text."""

    def chunks(self, delta: Delta) -> list[Json]:
        """Returns the event for `delta`; an empty list if `delta` has nothing to report."""
        self.finding.add([ContentDelta(delta.text)])
        text = self._echo() + delta.text
        shapes = self._new_shapes(delta)
        is_first, self._has_started = not self._has_started, True
        has_ids = self._tells_ids and delta.token_ids
        if not (text or shapes or delta.end or has_ids):
            return []
        choice: Json = {
            "index": self._index,
            "text": text,
            "logprobs": joined(shapes) if shapes else None,
            "finish_reason": delta.end.reason if delta.end else None,
            "stop_reason": delta.end.stop_reason if delta.end else None,
        }
        if self._tells_ids:
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = self._prompt.token_ids
        return [choice]

    def add(self, delta: Delta) -> None:
        """Adds `delta` to the complete choice."""
        self.finding.add([ContentDelta(delta.text)])
        self._texts.append(self._echo() + delta.text)
        self._shapes.extend(self._new_shapes(delta))
        self._token_ids.extend(delta.token_ids)
        self._end = delta.end or self._end
        self._has_started = True

    def whole(self) -> Json:
        """Returns the complete choice as JSON."""
        body = self._body
        choice: Json = {
            "index": self._index,
            "text": "".join(self._texts),
            "logprobs": joined(self._shapes) if self._logprobs else None,
            "finish_reason": self._end.reason if self._end else None,
            "stop_reason": self._end.stop_reason if self._end else None,
            "prompt_logprobs": None,
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.prompt_scores, self._names)
        if self._tells_ids:
            choice["prompt_token_ids"] = self._prompt.token_ids
            choice["token_ids"] = self._token_ids
        return choice

    async def end_fields(self) -> Json:
        """Returns what a check of the ended choice finds."""
        return await self.finding.fields()

    def extra_fields(self) -> Json:
        """Returns an empty object: each choice reports its own prompt."""
        return {}

    def _echo(self) -> str:
        return "" if self._has_started or not self._body.echo else self._prompt.text

    def _new_shapes(self, delta: Delta) -> list[dict[str, list[object]]]:
        if self._logprobs is None:
            return []
        shapes = []
        if self._body.echo and not self._has_started:
            shapes.append(self._logprobs.unscored(self._prompt.token_ids[0]))
            shapes.append(self._logprobs.shape(self.prompt_scores))
        if delta.logprobs:
            shapes.append(self._logprobs.shape(delta.logprobs))
        return shapes


def _logprobs(
    body: CompletionRequest, request: TextRequest, prompt: EncodedPrompt, names: TokenNames
) -> CompletionLogprobs | None:
    if body.logprobs is None:
        return None
    tokenizer = request.served.tokenizer
    if tokenizer is None:
        return CompletionLogprobs(names, None)
    context = () if body.echo or not prompt.is_continued else prompt.token_ids
    detokenizer = tokenizer.detokenizer(context, skip_special_tokens=body.skip_special_tokens)
    return CompletionLogprobs(names, detokenizer)
