"""The fields of completions and chats that say how tokens are chosen, and for whom."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag, WithJsonSchema

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
    described,
    text_or_list,
)
from splitserve_gateway.schemas.formats import GUIDED, RESPONSE_FORMAT, STRUCTURED_OUTPUTS

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

    temperature: Annotated[float | None, described(minimum=0, maximum=100)] = None
    top_p: Annotated[float | None, described(exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[Int32 | None, described(minimum=-1)] = None
    min_p: Annotated[float | None, described(minimum=0, maximum=1)] = None
    repetition_penalty: Annotated[float | None, described(exclusiveMinimum=0, maximum=100)] = None
    presence_penalty: Annotated[float | None, described(minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, described(minimum=-2, maximum=2)] = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, described(minimum=-100, maximum=100)]],
            Field(max_length=1024),
            described(propertyNames={"pattern": "^[0-9]{1,9}$"}),
        ]
        | None
    ) = None
    seed: Int64 | None = None
    n: Annotated[Int32 | None, described(minimum=1, maximum=128)] = None
    best_of: Annotated[Int32 | None, described(minimum=1, maximum=128)] = None
    use_beam_search: Flag = False
    length_penalty: Annotated[float | None, described(minimum=-10, maximum=10)] = None
    early_stopping: bool | None = None

    max_tokens: Annotated[Int32 | None, described(minimum=1)] = None
    min_tokens: Annotated[Int32 | None, described(minimum=0)] = None
    stop: _Stops | None = None
    stop_token_ids: Annotated[list[TokenId], at_most(256)] | None = None
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    bad_words: Annotated[list[_BadWord], at_most(MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], at_most(16384), described(minItems=1)] | None = None
    skip_special_tokens: Flag = True

    prompt_token_ids: Annotated[TokenIds | None, described(minItems=1)] = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Int32, Field(ge=-1)] | None = None
    echo: Flag = False
    prompt_logprobs: Annotated[Int32 | None, described(minimum=0, maximum=20)] = None
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = False

    user: Label | None = None
    priority: Annotated[Int32 | None, described(minimum=-100, maximum=100)] = None
    cache_salt: Label | None = None
    num_public_prefix_tokens: Annotated[Int32 | None, described(minimum=0)] = None
    deadline_s: Annotated[float, Field(gt=0, le=10**9)] | None = None
    request_id: Label | None = None

    response_format: Annotated[FreeJson, WithJsonSchema(RESPONSE_FORMAT)] = None
    structured_outputs: Annotated[FreeJson, WithJsonSchema(STRUCTURED_OUTPUTS)] = None
    guided_json: Annotated[FreeJson, WithJsonSchema(GUIDED["json"])] = None
    guided_regex: Annotated[FreeJson, WithJsonSchema(GUIDED["regex"])] = None
    guided_choice: Annotated[FreeJson, WithJsonSchema(GUIDED["choice"])] = None
    guided_grammar: Annotated[FreeJson, WithJsonSchema(GUIDED["grammar"])] = None
    logits_processors: Refused = None
    kv_transfer_params: Refused = None
    vllm_xargs: Refused = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop
