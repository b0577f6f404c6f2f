"""How models mark what they think before they answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ReasoningState(enum.Enum):
    """Where a model is with its reasoning when it begins to answer."""

    NOT_BEGUN = "not_begun"
    OPEN = "open"  # the answer begins within it
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts before and after reasoning, which stands at the beginning of an answer."""

    name: str
    opener: str
    closer: str

    def state_after(self, prompt: str) -> ReasoningState:
        """Where a rendered prompt leaves the model."""
        end = prompt[-1024:].rstrip()
        if end.endswith(self.opener):
            return ReasoningState.OPEN
        return ReasoningState.CLOSED if end.endswith(self.closer) else ReasoningState.NOT_BEGUN


THINK = ReasoningMarks("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningMarks("mistral", "[THINK]", "[/THINK]")

REASONING_MARKS = {each.name: each for each in (THINK, MISTRAL_THINK)}
