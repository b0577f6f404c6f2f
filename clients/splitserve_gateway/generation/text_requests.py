"""Text requests: sampling and scheduling parameters from request bodies, and bounds on logprobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from splitserve_contract import PARAMETERS
from splitserve_gateway.generation.choices import FieldNames, TextRequest
from splitserve_gateway.generation.deltas import Delta, Event
from splitserve_gateway.generation.prompts import EncodedPrompt, Serving, run_off_loop
from splitserve_gateway.generation.stream_places import (
    MAX_IDENTIFIED_CHOICES,
    EventId,
    StreamOrigin,
    StreamPlace,
)
from splitserve_gateway.http import ApiError, invalid
from splitserve_gateway.schemas import GRAMMAR_FIELDS, SamplingFields, SchedulingFields
from splitserve_gateway.upstreams import ServedByScheduler
from splitserve_text import (
    BeamSearch,
    EarlyStopping,
    SamplingParams,
    SchedulingParams,
    TextRules,
)


async def text_request(
    serving: Serving,
    body: SamplingFields,
    params: SamplingParams,
    prompts: Sequence[EncodedPrompt],
    fields: FieldNames,
) -> TextRequest:
    """Returns the text request of `body`, for `prompts` and `params`. `fields`: see `TextRequest`.

    Raises ApiError and SplitserveError.
    """
    if params.grammar is not None and params.beam_search is not None:
        raise invalid("grammar cannot be combined with use_beam_search", "grammar")
    scored = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    check_prompt_scores(prompts, params, scored)
    if serving.served.tokenizer is None:
        _check_needs_no_text(body, params)
    words = body.bad_words
    if words:
        tokenizer = serving.tokenizer
        token_ids = await run_off_loop(
            tokenizer, sum(map(len, words)), lambda: tokenizer.bad_words_token_ids(words)
        )
        params = replace(params, bad_words_token_ids=token_ids)
    endings = _ending_token_ids(serving.served.model.eos_token_ids, params)
    rules = TextRules(
        tuple(body.stops),
        body.include_stop_str_in_output,
        body.skip_special_tokens,
        hidden_token_ids=frozenset() if body.include_stop_str_in_output else endings,
    )
    place = _stream_place(serving, body, params, len(prompts))
    return TextRequest(
        serving.upstream,
        serving.served,
        prompts,
        params,
        rules,
        scheduling_params(body, "" if serving.adapter is None else serving.adapter.name),
        fields,
        serving.caller,
        body.request_id,
        serving.adapter,
        StreamOrigin() if place is None else place.origin,
        place,
        serving.config.resume_streams_s,
    )


def _stream_place(
    serving: Serving, body: SamplingFields, params: SamplingParams, num_prompts: int
) -> StreamPlace | None:
    """Returns where the stream of `body` begins; None if its events have no ids. Raises ApiError.

    Without an id of a last event it begins anew.
    """
    num_choices = num_prompts * params.num_completions
    has_ids = (
        body.stream
        and params.is_streamed
        and params.num_logprobs is None
        and params.num_prompt_logprobs is None
        and num_choices <= MAX_IDENTIFIED_CHOICES
        and 0 < serving.config.resume_streams_s <= serving.served.model.max_kept_s
    )
    resuming = serving.resuming
    if not resuming.last_event_id:
        has_ids = has_ids and resuming.takes_ids
        return StreamPlace(StreamOrigin(), num_choices) if has_ids else None
    if not has_ids:
        message = "Last-Event-ID is given, but the events of this answer have no ids; allowed: none"
        raise invalid(message, code="last_event_id_invalid")
    resumed = EventId.parse(resuming.last_event_id)
    resumed.check(num_choices)
    return StreamPlace(resumed.origin, num_choices, resumed)


def _check_needs_no_text(body: SamplingFields, params: SamplingParams) -> None:
    """Raises ApiError for fields that need text if the model is served without a tokenizer."""
    text_fields = {"stop": body.stops, "bad_words": body.bad_words}
    if params.grammar is not None:
        text_fields |= {name: getattr(body, name) for name in GRAMMAR_FIELDS}
    for name, value in text_fields.items():
        if value:
            message = f"{name} needs a tokenizer, but the model has none here; allowed: none"
            raise invalid(message, name, "tokenizer_unavailable")


def _ending_token_ids(eos_token_ids: Collection[int], params: SamplingParams) -> frozenset[int]:
    """Returns the token ids that end a text: stop tokens, and EOS tokens unless ignored."""
    own = frozenset(params.stop_token_ids)
    return own if params.ignore_eos else own.union(eos_token_ids)


# -- Sampling and scheduling parameters ------------------------------------------------------------

# Numbers whose fields have the same names and meanings in bodies and in SamplingParams.
_SAME_IN_BODIES = tuple(
    p.name for p in PARAMETERS if p.name == p.api_name and p.name != "max_tokens"
)


def sampling_params(
    body: SamplingFields,
    served: ServedByScheduler,
    *,
    max_tokens: int | None,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Returns the sampling parameters of `body`. The model's recommendations fill open fields.

    Excludes `bad_words` and stop strings, which are texts. Raises ApiError.
    """
    beam = beam_search(body)
    params = SamplingParams(
        **{name: getattr(body, name) for name in _SAME_IN_BODIES},
        logit_bias=body.logit_bias or {},
        max_tokens=max_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        beam_search=beam,
        allowed_token_ids=_allowed(body),
    )
    return params.with_defaults(served.model.default_sampling_params)


def _allowed(body: SamplingFields) -> tuple[int, ...] | None:
    if body.allowed_token_ids == []:
        raise invalid("allowed_token_ids is empty; allowed: 1 or more", "allowed_token_ids")
    return tuple(body.allowed_token_ids) if body.allowed_token_ids is not None else None


def beam_search(body: SamplingFields) -> BeamSearch | None:
    """Returns the beam search of `body`, with width `n`; None without one. Raises ApiError."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0) or body.early_stopping:
            param = "early_stopping" if body.early_stopping else "length_penalty"
            raise invalid(f"{param} requires use_beam_search", param)
        return None
    stopping = EarlyStopping.ALWAYS if body.early_stopping else EarlyStopping.HEURISTIC
    return BeamSearch(body.n or 1, body.length_penalty, stopping)


def scheduling_params(body: SchedulingFields, adapter: str = "") -> SchedulingParams:
    """Returns the scheduling parameters of `body`: priority, tenant, deadline and others.

    `adapter`: name of the adapter; empty for none.
    """
    return SchedulingParams(
        priority=body.priority or 0,
        tenant=body.user or "",
        deadline_s=body.deadline_s,
        adapter=adapter,
        cache_salt=body.cache_salt or "",
        num_public_prefix_tokens=body.num_public_prefix_tokens or 0,
        target_itl_ms=body.target_itl_ms,
    )


# -- Bounds on logprobs of answers that are collected before sending -------------------------------

E = TypeVar("E", bound=Event)

# Each score takes half a KiB until it is encoded as JSON.
MAX_SCORES = 2**20


def check_prompt_scores(
    prompts: Sequence[EncodedPrompt], params: SamplingParams, param: str
) -> None:
    """Raises ApiError if the prompts have too many logprobs.

    `param`: the field that asks for them.
    """
    if params.num_prompt_logprobs is None:
        return
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    num_scores = num_tokens * (1 + params.num_prompt_logprobs) * params.num_completions
    if num_scores > MAX_SCORES:
        what = f"the choices have {num_scores} prompt logprobs"
        raise _too_many(param, what)


async def gathered(events: AsyncGenerator[E, None], param: str) -> AsyncGenerator[E, None]:
    """Passes on `events` that become one answer. Raises ApiError for too many logprobs of outputs.

    `param`: the field that asks for logprobs. Closes `events`.
    """
    num_scores = 0
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                num_scores += sum(1 + len(score.top) for score in event.logprobs)
                if num_scores > MAX_SCORES:
                    raise _too_many(param, "the answer has too many logprobs")
            yield event


def _too_many(param: str, what: str) -> ApiError:
    message = f"{what}; allowed: at most {MAX_SCORES}, alternatives included"
    return invalid(message, param, "too_many_logprobs")
