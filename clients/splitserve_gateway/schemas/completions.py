"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from splitserve_gateway.schemas.base import Int32, Refused, TokenIds
from splitserve_gateway.schemas.sampling import SamplingFields

MAX_PROMPTS = 1024

_Batch = Annotated[list[str | TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionRequest(SamplingFields):
    """What `/v1/completions` takes. `prompt`: a text, its token ids, or a batch of either."""

    prompt: str | TokenIds | _Batch | None = None
    logprobs: Int32 | None = None
    suffix: Refused = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one; empty if there is none."""
        match self.prompt:
            case None:
                return [] if self.prompt_token_ids is None else [self.prompt_token_ids]
            case str(text):
                return [text]
            case [int(), *_] | []:
                return [self.prompt]  # type: ignore[list-item]  # then all are
            case _:
                return self.prompt  # type: ignore[return-value]
