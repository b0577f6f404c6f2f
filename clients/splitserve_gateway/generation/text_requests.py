"""Puts together what text is generated from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from splitserve_client import SamplingParams
from splitserve_gateway.generation.choice_text import StopRule, ending_token_ids
from splitserve_gateway.generation.choices import TextRequest
from splitserve_gateway.generation.prompts import EncodedPrompt, beside_the_loop
from splitserve_gateway.generation.sampling import scheduling_params
from splitserve_gateway.generation.serving import Serving
from splitserve_gateway.schemas.sampling import SamplingFields


async def text_request(
    serving: Serving,
    body: SamplingFields,
    params: SamplingParams,
    prompts: Sequence[EncodedPrompt],
) -> TextRequest:
    """The generation that `body` asks for, from `prompts` by `params`.

    Raises SplitserveError.
    """
    words = body.bad_words
    if words:
        tokenizer = serving.tokenizer
        token_ids = await beside_the_loop(
            tokenizer, sum(map(len, words)), lambda: tokenizer.bad_words_token_ids(words)
        )
        params = replace(params, bad_words_token_ids=token_ids)
    stop_rule = StopRule(
        tuple(body.stops),
        ending_token_ids(
            serving.served.model.eos_token_ids, params.stop_token_ids, ignore_eos=params.ignore_eos
        ),
        body.include_stop_str_in_output,
        params.min_tokens or 0,
    )
    return TextRequest(
        serving.upstream,
        serving.served,
        prompts,
        params,
        stop_rule,
        scheduling_params(body),
        body.skip_special_tokens,
    )
