"""The choices of a request as they come: of one prompt or several, one completion or several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from splitserve_client import (
    Finish,
    FinishReason,
    InvalidRequest,
    RequestFailed,
    SamplingParams,
    SchedulingParams,
    SplitserveError,
    TokenLogprob,
    Tokens,
)
from splitserve_gateway.generation.choice_text import ChoiceText, StopRule
from splitserve_gateway.generation.prompts import EncodedPrompt
from splitserve_gateway.generation.sampling import COMPLETION_FIELDS, refusal
from splitserve_gateway.http.errors import invalid
from splitserve_gateway.upstreams.upstream import Served, Upstream

# Events of each prompt of a batch that wait to be written.
_MAX_WAITING = 4


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Everything that text is generated from. `fields`: see `sampling.refusal`."""

    upstream: Upstream
    served: Served
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    stop_rule: StopRule
    scheduling: SchedulingParams
    skip_special_tokens: bool = True
    fields: Mapping[str, str] = field(default_factory=lambda: COMPLETION_FIELDS)


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
    """The events of all prompts, of each in order. What goes wrong with one ends all."""
    queue: asyncio.Queue[Event | BaseException | None]
    queue = asyncio.Queue(_MAX_WAITING * len(request.prompts))

    async def pump(index: int) -> None:
        try:
            async with aclosing(_PromptChoices(request, index).stream()) as events:
                async for event in events:
                    await queue.put(event)
        except Exception as error:  # raised again by whoever reads
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(index)) for index in range(len(request.prompts))]
    num_running = len(pumps)
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
        params = request.params
        num_choices = params.num_completions
        self._first_index = prompt_index * num_choices
        self._texts = [self._new_text() for _ in range(num_choices)]
        self._has_ended = [False] * num_choices
        self._num_output_tokens = 0
        self._scores: list[TokenLogprob] = []

    def _new_text(self) -> ChoiceText:
        tokenizer = self._request.served.tokenizer
        assert tokenizer is not None, "prompts were encoded"
        context = self._prompt.token_ids if self._prompt.is_continued else ()
        detokenizer = tokenizer.detokenizer(
            context, skip_special_tokens=self._request.skip_special_tokens
        )
        return ChoiceText(detokenizer, self._request.stop_rule)

    async def stream(self) -> AsyncGenerator[Event, None]:
        """Streams the deltas, then the Totals of this prompt."""
        request = self._request
        params = request.params
        asked = request.upstream.request(
            self._prompt.token_ids, params, request.scheduling, request.served.model.digest
        )
        num_cached_tokens = 0
        async with aclosing(asked.events()) as events:
            async for event in events:
                if isinstance(event, Finish):
                    num_cached_tokens = event.usage.num_cached_tokens
                    for delta in self._rest(event):
                        yield delta
                    break
                if event.prompt_logprobs:
                    self._scores.extend(event.prompt_logprobs)
                if event.token_ids and self._scores:
                    yield PromptScores(self._prompt_index, tuple(self._scores))
                    self._scores.clear()
                if (gained := self._push(event)) is not None:
                    yield gained
                    if all(self._has_ended) and params.is_streamed:
                        asked.abort()
                        num_cached_tokens = await _cached_tokens_of_rest(events)
                        break
        yield Totals(len(self._prompt.token_ids), self._num_output_tokens, num_cached_tokens)

    def _push(self, tokens: Tokens) -> Delta | None:
        """What `tokens` bring their choice; None if nothing, as after its end."""
        if self._has_ended[tokens.index] or not (tokens.token_ids or tokens.finish):
            return None
        text = self._texts[tokens.index]
        shown, num_read = text.push(tokens.token_ids)
        self._num_output_tokens += num_read
        end = None
        if text.stop_string is not None:
            end = ChoiceEnd("stop", text.stop_string)
        elif tokens.finish is not None:
            shown += text.finish()
            end = self._end(text, tokens.finish.reason, tokens.finish.stop_token_id)
        self._has_ended[tokens.index] = end is not None
        index = self._first_index + tokens.index
        if num_read == len(tokens.token_ids):
            return Delta(index, shown, tokens.token_ids, tokens.logprobs, end)
        return Delta(index, shown, tokens.token_ids[:num_read], tokens.logprobs[:num_read], end)

    def _rest(self, finish: Finish) -> list[Delta]:
        """The ends of choices that have not ended when the request does."""
        deltas = []
        for index, text in enumerate(self._texts):
            if not self._has_ended[index]:
                shown = text.finish()
                end = self._end(text, finish.reason, finish.stop_token_id)
                deltas.append(Delta(self._first_index + index, shown, end=end))
        return deltas

    def _end(self, text: ChoiceText, reason: FinishReason, stop_token_id: int | None) -> ChoiceEnd:
        if text.stop_string is not None:
            return ChoiceEnd("stop", text.stop_string)
        is_own = stop_token_id not in self._request.served.model.eos_token_ids
        return ChoiceEnd(_REASONS[reason], stop_token_id if is_own else None)


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
