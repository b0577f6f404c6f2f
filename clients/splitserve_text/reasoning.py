"""Marks of reasoning, by families of models."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ReasoningState(enum.Enum):
    """State of the model's reasoning when its answer begins."""

    NOT_BEGUN = "not_begun"
    OPEN = "open"  # the answer begins within reasoning
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Texts before and after reasoning, which stands before content and calls.

    `openers`, `closers`: the first of each is the usual one. `wrappers`: texts around the content
    that follows, each with its end; they are dropped. `special`: parts of these texts that may be
    special tokens of a model, if not the texts themselves.
    """

    name: str
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    wrappers: tuple[tuple[str, str], ...] = ()
    special: tuple[str, ...] = ()

    @property
    def opener(self) -> str:
        """Usual text before reasoning."""
        return self.openers[0]

    @property
    def closer(self) -> str:
        """Usual text after reasoning."""
        return self.closers[0]

    @property
    def marker_texts(self) -> tuple[str, ...]:
        """Texts of this notation that models may have as special tokens."""
        wrappers = [text for pair in self.wrappers for text in pair]
        return (*(self.special or (*self.openers, *self.closers)), *wrappers)

    def state_after(self, prompt: str) -> ReasoningState:
        """Returns the reasoning state at the end of a rendered prompt."""
        end = prompt[-1024:].rstrip()
        if end.endswith(self.openers):
            return ReasoningState.OPEN
        return ReasoningState.CLOSED if end.endswith(self.closers) else ReasoningState.NOT_BEGUN


THINK = ReasoningMarks("think", ("<think>",), ("</think>",))
THINK_ANSWER = ReasoningMarks(
    "think_answer",
    ("<think>",),
    ("</think>",),
    (("<answer>", "</answer>"), ("<response>", "</response>")),
)
MISTRAL_THINK = ReasoningMarks("mistral", ("[THINK]",), ("[/THINK]",))
SEED_THINK = ReasoningMarks("seed", ("<seed:think>",), ("</seed:think>",))
COMMAND_THINK = ReasoningMarks(
    "command",
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
)
GRANITE_THINK = ReasoningMarks(
    "granite",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
GEMMA4_THINK = ReasoningMarks(
    "gemma4", ("<|channel>thought",), ("<channel|>",), special=("<|channel>", "<channel|>")
)
KIMI_THINK = ReasoningMarks("kimi_vl", ("◁think▷",), ("◁/think▷",))
APRIEL_THINK = ReasoningMarks(
    "apriel",
    ("Here are my reasoning steps:",),
    ("[BEGIN FINAL RESPONSE]",),
)
# Reasoning is a message of its own (`channels`).
HARMONY_THINK = ReasoningMarks(
    "harmony",
    ("<|channel|>analysis<|message|>",),
    ("<|end|>",),
    special=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|constrain|>"),
)

REASONING_MARKS = {
    each.name: each
    for each in (
        HARMONY_THINK, MISTRAL_THINK, SEED_THINK, COMMAND_THINK, GEMMA4_THINK, KIMI_THINK,
        APRIEL_THINK, THINK_ANSWER, THINK, GRANITE_THINK,
    )
}  # fmt: skip
# Texts in chat templates that reveal marks, where these are not the marks themselves.
_REVEALING = {"harmony": ("<|channel|>",), "gemma4": ("<|channel>", "<channel|>")}
_OF_TOOL_RESULTS = "<minimax:tool_call>"  # the template has wrappers around results of tools


def reasoning_of(template: str) -> ReasoningMarks | None:
    """Returns the marks of reasoning that chat template `template` shows; None if it has none."""
    for marks in REASONING_MARKS.values():
        texts = _REVEALING.get(marks.name, (*marks.openers, *marks.closers))
        if any(text in template for text in texts) and _may_wrap(template, marks):
            return marks
    return None


def _may_wrap(template: str, marks: ReasoningMarks) -> bool:
    if marks is not THINK_ANSWER:
        return True
    has_wrappers = any(opener in template for opener, _ in marks.wrappers)
    return has_wrappers and _OF_TOOL_RESULTS not in template
