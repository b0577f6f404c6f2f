"""The fields of completions and chats that say how tokens are chosen, and for whom."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from splitserve_gateway.schemas.base import (
    Flag,
    FreeJson,
    IgnoredFields,
    Int32,
    Int64,
    Label,
    Name,
    Refused,
    StreamOptions,
    TokenId,
    TokenIds,
    at_most,
    text_or_list,
)

# Read by grammars.requested; at most one of them says what the answer is to be.
GRAMMAR_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 512
MAX_BAD_WORD_CHARS = 1024

_Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
_Stops = Annotated[
    Annotated[_Stop, Tag("<text>")] | Annotated[list[_Stop], at_most(MAX_STOPS), Tag("<list>")],
    Discriminator(text_or_list),
]
_BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]


class SamplingFields(IgnoredFields):
    """What both kinds of generation take. Ranges of numbers: the scheduler's."""

    model: Name | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[TokenId, float], Field(max_length=1024)] | None = None
    seed: Int64 | None = None
    n: Int32 | None = None
    best_of: Int32 | None = None
    use_beam_search: Flag = False
    length_penalty: float | None = None
    early_stopping: bool | None = None

    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    stop: _Stops | None = None
    stop_token_ids: Annotated[list[TokenId], at_most(256)] | None = None
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    bad_words: Annotated[list[_BadWord], at_most(MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], at_most(16384)] | None = None
    skip_special_tokens: Flag = True

    prompt_token_ids: TokenIds | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Int32, Field(ge=-1)] | None = None
    echo: Flag = False
    prompt_logprobs: Int32 | None = None
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = False

    user: Label | None = None
    priority: Int32 | None = None
    cache_salt: Label | None = None
    num_public_prefix_tokens: Int32 | None = None
    deadline_s: Annotated[float, Field(gt=0, le=10**9)] | None = None
    request_id: Label | None = None

    response_format: FreeJson = None
    structured_outputs: FreeJson = None
    guided_json: FreeJson = None
    guided_regex: FreeJson = None
    guided_choice: FreeJson = None
    guided_grammar: FreeJson = None
    logits_processors: Refused = None
    kv_transfer_params: Refused = None
    vllm_xargs: Refused = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop
