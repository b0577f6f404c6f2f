"""Events of a text request: increments of its choices, logprobs of its prompts, token counts."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve_text import TokenLogprob


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Finish reason of a choice.

    `stop_reason`: the stop string or stop token id that ended the choice.
    """

    reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """Increment of one choice.

    `index`: number of the choice; choices are numbered prompt by prompt.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    end: ChoiceEnd | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprobs of a prompt's tokens except the first. Precedes all other events of that prompt."""

    prompt_index: int
    scores: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Token counts of a request; the last event of the request."""

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
