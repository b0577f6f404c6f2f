"""The choices of a request as they come: of one prompt or several, one completion or several."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass

from splitserve_client import (
    ChatTemplateFailed,
    End,
    Finish,
    FinishReason,
    InvalidRequest,
    Piece,
    RequestFailed,
    RequestTexts,
    SamplingParams,
    SchedulingParams,
    SequenceFinish,
    SplitserveError,
    TextRules,
    TokenLogprob,
    Tokens,
)
from splitserve_gateway.callers.caller import Caller
from splitserve_gateway.generation.prompts import EncodedPrompt
from splitserve_gateway.http.errors import ApiError, api_error, invalid
from splitserve_gateway.schemas.chat import ChatRequest, CompletionRequest
from splitserve_gateway.schemas.sampling import GRAMMAR_FIELDS, SamplingFields
from splitserve_gateway.upstreams.upstream import Served, Upstream
from splitserve_rpc.log_context import log_context

# Events of each prompt of a batch that wait to be written.
_MAX_WAITING = 4
# Prompts of a batch that a scheduler has at a time: it has a queue for everybody's.
_MAX_PROMPTS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Everything that text is generated from. `fields`: what callers call them.

    `own_id`: what its caller calls the request, if it does.
    """

    upstream: Upstream
    served: Served
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    rules: TextRules
    scheduling: SchedulingParams
    fields: FieldNames
    caller: Caller
    own_id: str | None = None


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Why a choice ended. `stop_reason`: the stop string or stop_token_id that did it."""

    reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice gained. `index`: prompt by prompt, of each its choices."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    end: ChoiceEnd | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a prompt's tokens but the first; before anything else of that prompt."""

    prompt_index: int
    scores: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Token counts of a request, its last event."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_output_tokens + other.num_output_tokens,
            self.num_cached_tokens + other.num_cached_tokens,
        )


Event = Delta | PromptScores | Totals


async def stream_choices(request: TextRequest) -> AsyncGenerator[Event, None]:
    """Streams what the choices of all prompts gain, then the Totals.

    Closing it aborts the request. Raises SplitserveError, and ApiError for what the scheduler
    refuses.
    """
    try:
        if len(request.prompts) == 1:
            async with aclosing(_PromptChoices(request, 0).stream()) as events:
                async for event in events:
                    yield event
            return
        totals = Totals()
        async with aclosing(_merged(request)) as events:
            async for event in events:
                if isinstance(event, Totals):
                    totals += event
                else:
                    yield event
        yield totals
    except InvalidRequest as error:
        raise refusal(error, request.fields) from error
    except RequestFailed as error:
        if error.reason not in _refusals(request.params):
            raise
        raise invalid(error.message, code=error.reason.lower()) from error


def _refusals(params: SamplingParams) -> Collection[str]:
    """Reasons of failures that are the request's own doing."""
    is_constrained = (
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
        or params.grammar is not None
    )
    own = ("GRAMMAR_INVALID", "KV_CACHE_EXHAUSTED")
    return (*own, "INVALID_LOGITS") if is_constrained else own


async def _merged(request: TextRequest) -> AsyncGenerator[Event, None]:
    """The events of all prompts, of each in order. What goes wrong with one ends all.

    A few prompts are generated from at a time; the next begins when one of them ends.
    """
    num_pumps = min(_MAX_PROMPTS_AT_A_TIME, len(request.prompts))
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(_MAX_WAITING * num_pumps)
    remaining = iter(range(len(request.prompts)))

    async def pump() -> None:
        try:
            for index in remaining:
                async with aclosing(_PromptChoices(request, index).stream()) as events:
                    async for event in events:
                        await queue.put(event)
        except Exception as error:  # raised again by whoever reads
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump()) for _ in range(num_pumps)]
    num_running = num_pumps
    try:
        while num_running:
            event = await queue.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                num_running -= 1
            else:
                yield event
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class _PromptChoices:
    """The choices of one prompt."""

    def __init__(self, request: TextRequest, prompt_index: int) -> None:
        self._request = request
        self._prompt_index = prompt_index
        self._prompt = request.prompts[prompt_index]
        self._first_index = prompt_index * request.params.num_completions
        self._texts = RequestTexts(
            request.served.tokenizer,
            request.params,
            self._prompt.token_ids,
            request.rules,
            continues_prompt=self._prompt.is_continued,
        )
        self._scores: list[TokenLogprob] = []

    async def stream(self) -> AsyncGenerator[Event, None]:
        """Streams the deltas, then the Totals of this prompt."""
        request = self._request
        asked = request.upstream.request(
            self._prompt.token_ids,
            request.params,
            request.scheduling,
            request.served.model.digest,
            request.caller.credential,
            upstream_id(request.own_id, self._prompt_index),
        )
        async with aclosing(asked.events()) as events:
            async for event in events:
                for part in self._texts.receive(event):
                    if isinstance(part, End):
                        num_cached_tokens = part.usage.num_cached_tokens
                        if not isinstance(event, Finish):
                            asked.abort()
                            num_cached_tokens = await _cached_tokens_of_rest(events)
                        yield self._totals(num_cached_tokens)
                        return
                    if part.prompt_logprobs:
                        self._scores.extend(part.prompt_logprobs)
                    if part.token_ids and self._scores:
                        yield self._take_scores()
                    if part.token_ids or part.finish:
                        yield self._delta(part)

    def _take_scores(self) -> PromptScores:
        scores, self._scores = self._scores, []
        return PromptScores(self._prompt_index, tuple(scores))

    def _delta(self, piece: Piece) -> Delta:
        end = None if piece.finish is None else self._end(piece.finish, piece.stop_string)
        index = self._first_index + piece.index
        # Without a tokenizer the pieces are numbers, which are no text.
        text = piece.text if self._request.served.tokenizer is not None else ""
        return Delta(index, text, piece.token_ids, piece.logprobs, end)

    def _end(self, finish: SequenceFinish, stop_string: str | None) -> ChoiceEnd:
        stop_token_id = finish.stop_token_id
        if stop_string is not None or stop_token_id in self._request.served.model.eos_token_ids:
            return ChoiceEnd(_REASONS[finish.reason], stop_string)
        return ChoiceEnd(_REASONS[finish.reason], stop_token_id)

    def _totals(self, num_cached_tokens: int) -> Totals:
        num_prompt_tokens = len(self._prompt.token_ids)
        return Totals(num_prompt_tokens, self._texts.num_output_tokens, num_cached_tokens)


async def _cached_tokens_of_rest(events: AsyncGenerator[Tokens | Finish, None]) -> int:
    """What an aborted request says of itself at its end."""
    with suppress(SplitserveError):
        async for event in events:
            if isinstance(event, Finish):
                return event.usage.num_cached_tokens
    return 0


_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.MODEL_LENGTH: "length",
    FinishReason.ABORTED: "abort",
}


# -- What callers call a field, which depends on the endpoint: a refusal names it as they do -------

# By the names that the scheduler has, or chats; `*` is an index.
FieldNames = Mapping[str, str]

COMPLETION_FIELDS: FieldNames = {
    "num_logprobs": "logprobs",
    "num_prompt_logprobs": "prompt_logprobs",
    "bad_words_token_ids": "bad_words",
    "beam_search": "use_beam_search",
    "beam_search.width": "n",
    "beam_search.length_penalty": "length_penalty",
    "tenant": "user",
    "deadline": "deadline_s",
    "resume_sequences": "n",
    "prompt": "prompt",
}
CHAT_FIELDS: FieldNames = {
    **COMPLETION_FIELDS,
    "num_logprobs": "top_logprobs",
    "prompt": "messages",
}
RESPONSE_FIELDS: FieldNames = {
    **CHAT_FIELDS,
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "n": "use_beam_search",
    "beam_search.width": "use_beam_search",
    "resume_sequences": "use_beam_search",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.allowed_tools.tools.*.function": "tool_choice.tools.*",
    "tool_choice.function": "tool_choice",
    "tools.*.function": "tools.*",
}
_OF_PROMPTS = ("PROMPT_EMPTY", "PROMPT_TOO_LONG", "TOKEN_OUT_OF_RANGE")


def completion_fields(body: CompletionRequest) -> FieldNames:
    """What `body` has them called."""
    prompt = "prompt" if body.prompt_token_ids is None else "prompt_token_ids"
    return {**COMPLETION_FIELDS, "prompt": prompt, "grammar": _grammar_field(body)}


def chat_fields(body: ChatRequest) -> FieldNames:
    """What `body` has them called."""
    names = {**CHAT_FIELDS, "grammar": _grammar_field(body)}
    if body.prompt_token_ids is not None:
        names["prompt"] = "prompt_token_ids"
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def response_fields(chat: ChatRequest) -> FieldNames:
    """What the response that is asked for by `chat` has them called."""
    field = _grammar_field(chat)
    return {**RESPONSE_FIELDS, "grammar": RESPONSE_FIELDS.get(field, field)}


def _grammar_field(body: SamplingFields) -> str:
    given = (name for name in GRAMMAR_FIELDS if getattr(body, name) is not None)
    return next(given, "tools")


@contextmanager
def naming(names: FieldNames) -> Iterator[None]:
    """What is refused in here is refused by these names. Raises ApiError for it."""
    try:
        yield
    except ApiError as error:
        _rename(error, names)
        raise
    except InvalidRequest as error:
        raise refusal(error, names) from error
    except ChatTemplateFailed as error:
        refused = api_error(error)
        _rename(refused, names)
        raise refused from error


def refusal(error: InvalidRequest, names: FieldNames) -> ApiError:
    """The scheduler's refusal, with the field at fault, which its message names first."""
    refused = api_error(error)
    name = re.split(r"[ ,\[]", error.message, maxsplit=1)[0]
    if error.reason in _OF_PROMPTS:
        refused.message = re.sub("^prompt_token_ids", "prompt", refused.message)
        name = "prompt"
    elif name not in names:
        name = name.partition(".")[0]
        if name not in names and name not in SamplingFields.model_fields:
            return refused
    refused.param = name
    _rename(refused, names)
    return refused


def _rename(error: ApiError, names: FieldNames) -> None:
    """In a message it is the first word, or what something cannot be combined with."""
    inside = error.param
    if inside is None:
        return
    error.param = _renamed(inside, names)
    if re.match(rf"{re.escape(inside)}(?![\w.])", error.message):
        error.message = f"{error.param}{error.message[len(inside) :]}"
    before, combined, other = error.message.partition(" combined with ")
    if combined:
        error.message = f"{before}{combined}{_renamed(other, names)}"


def _renamed(path: str, names: FieldNames) -> str:
    for name in sorted(names, key=len, reverse=True):
        pattern = re.escape(name).replace(r"\*", r"(\d+)") + r"(?![^.])"
        if re.match(pattern, path):
            return re.sub(pattern, names[name].replace("*", r"\1"), path, count=1)
    return path


# --------------------------------------------------------------------------------------------------
# What a request is called: to its caller, and to schedulers, so that one is found by the other.

_PREFIX = "req_"
# Schedulers take 128 characters, of which ours need some.
_MAX_OWN_CHARS = 80


def exchange_id() -> str:
    """Of the HTTP request that is answered: what its x-request-id has after the prefix."""
    context = log_context.get()
    if context is None or not context.request_id.startswith(_PREFIX):
        return secrets.token_hex(16)
    return context.request_id.removeprefix(_PREFIX)


def answer_id(own: str | None) -> str:
    """Of an answer, but for what it begins with. `own`: what its caller calls it, if it does."""
    return own or exchange_id()


def upstream_id(own: str | None, prompt_index: int) -> str:
    """Of the request for one prompt; callers may use their own ids as often as they like.

    `watching/explanation.py` of the scheduler takes it apart.
    """
    parts = [own[:_MAX_OWN_CHARS]] if own else []
    return ".".join([*parts, exchange_id(), str(prompt_index)])
