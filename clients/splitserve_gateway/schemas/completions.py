"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import ConfigDict, Discriminator, Field, Tag

from splitserve_gateway.schemas.base import Int32, Refused, TokenIds, described, needs_one_of
from splitserve_gateway.schemas.sampling import SamplingFields

MAX_PROMPTS = 1024


def _kind_of_prompt(value: object) -> str:
    if not isinstance(value, list):
        return "<text>"
    match value:
        case [str(), *_]:
            return "<texts>"
        case [list(), *_]:
            return "<lists>"
        case _:
            return "<tokens>"


_Many = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
_Text = Annotated[str, described(minLength=1)]
_Tokens = Annotated[TokenIds, described(minItems=1)]
_Prompt = Annotated[
    Annotated[_Text, Tag("<text>")]
    | Annotated[_Tokens, Tag("<tokens>")]
    | Annotated[list[_Text], _Many, Tag("<texts>")]
    | Annotated[list[_Tokens], _Many, Tag("<lists>")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(SamplingFields):
    """What `/v1/completions` takes. `prompt`: a text, its token ids, or a batch of either."""

    model_config = ConfigDict(json_schema_extra=needs_one_of("prompt", "prompt_token_ids"))

    prompt: _Prompt | None = None
    logprobs: Annotated[Int32 | None, described(minimum=0, maximum=20)] = None
    suffix: Refused = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one; empty if there is none."""
        prompt = self.prompt
        if prompt is None:
            return [] if self.prompt_token_ids is None else [self.prompt_token_ids]
        if isinstance(prompt, str):
            return [prompt]
        is_batch = bool(prompt) and isinstance(prompt[0], str | list)
        return cast(list[str] | list[list[int]], prompt if is_batch else [prompt])
