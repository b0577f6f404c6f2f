"""Puts together what text is generated from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from splitserve_client import SamplingParams, TextRules
from splitserve_gateway.generation.choices import TextRequest
from splitserve_gateway.generation.field_names import FieldNames
from splitserve_gateway.generation.prompts import EncodedPrompt, beside_the_loop
from splitserve_gateway.generation.sampling import scheduling_params
from splitserve_gateway.generation.scores import check_prompt_scores
from splitserve_gateway.generation.serving import Serving
from splitserve_gateway.http.errors import invalid
from splitserve_gateway.schemas.sampling import GRAMMAR_FIELDS, SamplingFields


async def text_request(
    serving: Serving,
    body: SamplingFields,
    params: SamplingParams,
    prompts: Sequence[EncodedPrompt],
    fields: FieldNames,
) -> TextRequest:
    """The generation that `body` asks for, from `prompts` by `params`; `fields`: see `TextRequest`.

    Raises ApiError and SplitserveError.
    """
    if params.grammar is not None and params.beam_search is not None:
        raise invalid("grammar does not go with use_beam_search", "grammar")
    scored = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    check_prompt_scores(prompts, params, scored)
    if serving.served.tokenizer is None:
        _check_needs_no_text(body, params)
    words = body.bad_words
    if words:
        tokenizer = serving.tokenizer
        token_ids = await beside_the_loop(
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
    return TextRequest(
        serving.upstream,
        serving.served,
        prompts,
        params,
        rules,
        scheduling_params(body),
        fields,
        serving.caller,
        body.request_id,
    )


def _check_needs_no_text(body: SamplingFields, params: SamplingParams) -> None:
    """Raises ApiError for a field that says something of a text, where there are only tokens."""
    asked = {"stop": body.stops, "bad_words": body.bad_words}
    if params.grammar is not None:
        asked |= {name: getattr(body, name) for name in GRAMMAR_FIELDS}
    for name, value in asked.items():
        if value:
            message = f"{name} is about text, and the model is served without a tokenizer; allowed:"
            raise invalid(f"{message} none", name, "tokenizer_unavailable")


def _ending_token_ids(eos_token_ids: Collection[int], params: SamplingParams) -> frozenset[int]:
    """The tokens that end a text."""
    own = frozenset(params.stop_token_ids)
    return own if params.ignore_eos else own.union(eos_token_ids)
