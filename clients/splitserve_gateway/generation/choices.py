"""Choices of a request, streamed from schedulers; names of fields in errors; ids of requests.

A request has one or more prompts, and each prompt one or more choices.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace

from splitserve_client import (
    AdapterUnknown,
    ChatTemplateFailed,
    InvalidRequest,
    RequestFailed,
    SplitserveError,
)
from splitserve_gateway.callers import Caller
from splitserve_gateway.generation.deltas import ChoiceEnd, Delta, Event, PromptScores, Totals
from splitserve_gateway.generation.prompts import EncodedPrompt, RequestedAdapter
from splitserve_gateway.generation.replay import cut_at, replayed
from splitserve_gateway.generation.stream_places import (
    EventId,
    StreamOrigin,
    StreamPlace,
    exchange_id,
)
from splitserve_gateway.http import ApiError, api_error, invalid
from splitserve_gateway.schemas import (
    GRAMMAR_FIELDS,
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    SamplingFields,
)
from splitserve_gateway.upstreams import ServedByScheduler, Upstream, UpstreamRequest
from splitserve_text import (
    End,
    Finish,
    FinishReason,
    KeptOutput,
    Piece,
    RequestTexts,
    SamplingParams,
    SchedulingParams,
    SequenceFinish,
    TextRules,
    TokenLogprob,
    Tokens,
)

# Queue bound: events per running prompt of a batch that wait to be written.
_MAX_WAITING = 4
# Prompts of one batch submitted at a time, so that a batch does not fill the scheduler's queue.
_MAX_PROMPTS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Complete input of a text generation.

    `fields`: the caller's names of fields, for errors. `own_id`: the caller's request id; None if
    the caller sent none. `adapter`: None for the model itself. `place`: None if the answer is not
    streamed, or its stream cannot be resumed; `kept_s`: time for which it can.
    """

    upstream: Upstream
    served: ServedByScheduler
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    rules: TextRules
    scheduling: SchedulingParams
    fields: FieldNames
    caller: Caller
    own_id: str | None = None
    adapter: RequestedAdapter | None = None
    origin: StreamOrigin = field(default_factory=StreamOrigin)
    place: StreamPlace | None = None
    kept_s: float = 0.0

    @property
    def answer_id(self) -> str:
        """Id of the answer without its prefix: the caller's own, if given."""
        return self.own_id or self.origin.exchange

    @property
    def model_name(self) -> str:
        """Name of the model or adapter, for answers."""
        return self.served.model.name if self.adapter is None else self.adapter.name


async def stream_choices(request: TextRequest) -> AsyncGenerator[Event, None]:
    """Streams the deltas and prompt scores of all prompts, then the Totals.

    Closing the generator aborts the request. Raises SplitserveError, and ApiError if the scheduler
    refuses the request.
    """
    place = request.place
    events = (
        _PromptChoices(request, 0).stream() if len(request.prompts) == 1 else _of_batch(request)
    )
    if place is not None and place.resumed is not None:
        events = replayed(events, place.resumed)
    with refusing(request.adapter, request.params, request.fields):
        async with aclosing(events):
            async for event in events:
                if place is not None:
                    place.advance(event)
                yield event


@contextmanager
def refusing(
    adapter: RequestedAdapter | None, params: SamplingParams, fields: FieldNames
) -> Iterator[None]:
    """Raises ApiError for errors of schedulers that the request itself causes.

    `fields`: the caller's names of fields.
    """
    try:
        yield
    except (AdapterUnknown, InvalidRequest) as error:
        if adapter is not None and _is_about_adapter(error, adapter):
            raise adapter.unknown() from error
        if isinstance(error, InvalidRequest):
            raise refusal(error, fields) from error
        raise
    except RequestFailed as error:
        if error.reason not in _refusals(params):
            raise
        raise invalid(error.message, code=error.reason.lower()) from error


def _is_about_adapter(error: SplitserveError, adapter: RequestedAdapter) -> bool:
    """Returns whether `error` shows that the scheduler has no such adapter."""
    is_unsupported = error.reason == "FEATURE_UNSUPPORTED" and not adapter.is_listed
    return isinstance(error, AdapterUnknown) or is_unsupported


def _refusals(params: SamplingParams) -> Collection[str]:
    """Returns the failure reasons that the request itself causes (reported as 400, not 500)."""
    is_constrained = (
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
        or params.grammar is not None
    )
    own = ("GRAMMAR_INVALID", "KV_CACHE_EXHAUSTED")
    return (*own, "INVALID_LOGITS") if is_constrained else own


async def _of_batch(request: TextRequest) -> AsyncGenerator[Event, None]:
    """Streams the events of all prompts, then their common Totals."""
    totals = Totals()
    async with aclosing(_merged(request)) as events:
        async for event in events:
            if isinstance(event, Totals):
                totals += event
            else:
                yield event
    yield totals


async def _merged(request: TextRequest) -> AsyncGenerator[Event, None]:
    """Merges the events of all prompts; events of one prompt stay in order.

    Runs at most `_MAX_PROMPTS_AT_A_TIME` prompts concurrently; the next prompt starts when a
    running prompt ends. An error of one prompt ends all prompts.
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
        except Exception as error:  # the reader of the queue raises it again
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
    """Generates the choices of one prompt."""

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
        resumed = None if request.place is None else request.place.resumed
        upstream_request = UpstreamRequest(
            request.upstream,
            self._prompt.token_ids,
            self._params(),
            replace(request.scheduling, kept_output=self._kept_output(resumed)),
            request.served.model.digest,
            request.caller.credential,
            upstream_id(request.own_id, self._prompt_index),
            self._prompt.encoder_token_ids,
        )
        events = upstream_request.events()
        if resumed is not None:
            events = cut_at(events, resumed, self._first_index)
        async with aclosing(events):
            async for event in events:
                for part in self._texts.receive(event):
                    if isinstance(part, End):
                        num_cached_tokens = part.usage.num_cached_tokens
                        if not isinstance(event, Finish):
                            upstream_request.abort()
                            num_cached_tokens = await _cached_tokens_of_rest(events)
                        yield self._totals(num_cached_tokens)
                        return
                    if part.prompt_logprobs:
                        self._scores.extend(part.prompt_logprobs)
                    if part.token_ids and self._scores:
                        yield self._take_scores()
                    if part.token_ids or part.finish:
                        yield self._delta(part)

    def _params(self) -> SamplingParams:
        request = self._request
        if request.place is None or request.params.seed is not None:
            return request.params
        # The gateway that may resume the stream knows this seed, too.
        return replace(request.params, seed=request.origin.seed(self._prompt_index))

    def _kept_output(self, resumed: EventId | None) -> KeptOutput | None:
        request = self._request
        if request.place is None:
            return None
        key = f"{request.origin.exchange}.{self._prompt_index}"
        if resumed is None:
            return KeptOutput(key, request.kept_s)
        own = resumed.read[self._first_index :][: request.params.num_completions]
        read = tuple(progress.num_tokens for progress in own)
        return KeptOutput(key, request.kept_s, resumes=True, num_read_tokens=read)

    def _take_scores(self) -> PromptScores:
        scores, self._scores = self._scores, []
        return PromptScores(self._prompt_index, tuple(scores))

    def _delta(self, piece: Piece) -> Delta:
        end = None if piece.finish is None else self._end(piece.finish, piece.stop_string)
        index = self._first_index + piece.index
        # Without a tokenizer the text of a piece is numbers: drop it.
        text = piece.text if self._request.served.tokenizer is not None else ""
        return Delta(index, text, piece.token_ids, piece.logprobs, end)

    def _end(self, finish: SequenceFinish, stop_string: str | None) -> ChoiceEnd:
        stop_token_id = finish.stop_token_id
        if stop_string is not None or stop_token_id in self._request.served.model.eos_token_ids:
            return ChoiceEnd(_REASONS[finish.reason], stop_string)
        return ChoiceEnd(_REASONS[finish.reason], stop_token_id)

    def _totals(self, num_cached_tokens: int) -> Totals:
        return Totals(self._prompt.num_tokens, self._texts.num_output_tokens, num_cached_tokens)


async def _cached_tokens_of_rest(events: AsyncGenerator[Tokens | Finish, None]) -> int:
    """Returns the cached token count from the Finish of an aborted request; 0 without a Finish."""
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


# -- Field names of endpoints, used in errors ------------------------------------------------------

# Maps the field names of the scheduler, or of chats, to those of the endpoint; `*` is an index.
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
    """Returns the field names for a completion `body`."""
    prompt = "prompt" if body.prompt_token_ids is None else "prompt_token_ids"
    return {**COMPLETION_FIELDS, "prompt": prompt, "grammar": _grammar_field(body)}


def chat_fields(body: ChatRequest) -> FieldNames:
    """Returns the field names for a chat `body`."""
    names = {**CHAT_FIELDS, "grammar": _grammar_field(body)}
    if body.prompt_token_ids is not None:
        names["prompt"] = "prompt_token_ids"
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def response_fields(body: ResponsesRequest, chat: ChatRequest) -> FieldNames:
    """Returns the Responses API field names for `body`, which was converted to `chat`."""
    field = _grammar_field(chat)
    # A chat lacks tools that the caller does not run.
    moved = {
        f"tools.{index}.function": f"tools.{own}"
        for index, own in enumerate(body.own_tools)
        if index != own
    }
    return {**moved, **RESPONSE_FIELDS, "grammar": RESPONSE_FIELDS.get(field, field)}


def _grammar_field(body: SamplingFields) -> str:
    present = (name for name in GRAMMAR_FIELDS if getattr(body, name) is not None)
    return next(present, "tools")


@contextmanager
def naming(names: FieldNames) -> Iterator[None]:
    """Renames fields in errors raised within the `with` to `names`. Raises ApiError for them."""
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
    """Converts a scheduler's refusal to an ApiError with the field at fault.

    The scheduler's message starts with that field; the ApiError names the field by `names`.
    """
    refused = api_error(error)
    name = re.split(r"[ ,\[]", error.message, maxsplit=1)[0]
    if error.reason in _OF_PROMPTS:
        refused.message = re.sub("^(prompt|encoder)_token_ids", "prompt", refused.message)
        name = "prompt"
    elif name not in names:
        name = name.partition(".")[0]
        if name not in names and name not in SamplingFields.model_fields:
            return refused
    refused.param = name
    _rename(refused, names)
    return refused


def _rename(error: ApiError, names: FieldNames) -> None:
    """Renames the field in `error.param` and in the message.

    The message contains the field as its first word, or after "combined with".
    """
    inside = error.param
    if inside is None:
        return
    error.param = renamed(inside, names)
    if re.match(rf"{re.escape(inside)}(?![\w.])", error.message):
        error.message = f"{error.param}{error.message[len(inside) :]}"
    before, combined, other = error.message.partition(" combined with ")
    if combined:
        error.message = f"{before}{combined}{renamed(other, names)}"


def renamed(path: str, names: FieldNames) -> str:
    """Returns the caller's name of the field at `path`."""
    for name in sorted(names, key=len, reverse=True):
        pattern = re.escape(name).replace(r"\*", r"(\d+)") + r"(?![^.])"
        if re.match(pattern, path):
            return re.sub(pattern, names[name].replace("*", r"\1"), path, count=1)
    return path


# -- Request ids -----------------------------------------------------------------------------------
# The id of an answer and the ids of its requests at schedulers share a part, for searches of logs.

_PREFIX = "req_"
# Schedulers accept ids of 128 characters; the gateway appends its own parts.
_MAX_OWN_CHARS = 80


def answer_id(own: str | None) -> str:
    """Returns the id of an answer without its prefix.

    `own`: the caller's request id, preferred if given.
    """
    return own or exchange_id()


def upstream_id(own: str | None, prompt_index: int) -> str:
    """Returns the scheduler's request id for one prompt.

    Unique even if callers reuse their own ids.
    The scheduler's `watching/explanation.py` parses this format.
    """
    parts = [own[:_MAX_OWN_CHARS]] if own else []
    return ".".join([*parts, exchange_id(), str(prompt_index)])
