"""How models mark what they think before they answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts before and after reasoning, which stands at the beginning of an answer."""

    name: str
    opener: str
    closer: str

    def is_open(self, prompt: str) -> bool:
        """Whether `prompt`, rendered, ends within reasoning: the answer then begins there."""
        return prompt.rstrip().endswith(self.opener)


THINK = ReasoningMarks("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningMarks("mistral", "[THINK]", "[/THINK]")

REASONING_MARKS = {each.name: each for each in (THINK, MISTRAL_THINK)}
