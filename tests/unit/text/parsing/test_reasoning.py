"""Reasoning is told from the answer, and calls are found behind it."""

from __future__ import annotations

import pytest

from splitserve_text.output_parser import MISTRAL_THINK, THINK, ReasoningState
from tests.unit.text.parsing.answers import answer

CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "starts_inside", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nHi\n", False, "hm\n", "Hi\n"),
        ("\n<think>hm</think>Hi", False, "hm", "Hi"),
        ("hm</think>Hi", True, "hm", "Hi"),
        ("\nhm", True, "hm", ""),
        ("<think>hm</think>Hi", True, "hm", "Hi"),
        ("<think>hm", False, "hm", ""),
        ("<think>hm</thin", False, "hm</thin", ""),
        ("<think></think>", False, "", ""),
        ("Hi <think>hm</think>", False, "", "Hi <think>hm</think>"),
        ("<thinking>", False, "", "<thinking>"),
        ("  Hi", False, "", "  Hi"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("<think>a<think>b</think>c", False, "a<think>b", "c"),
        (" ", False, "", " "),
        ("", True, "", ""),
    ],
)
def test_reasoning_ends_where_the_model_says(
    text: str, starts_inside: bool, reasoning: str, content: str
) -> None:
    whole = answer(text, "none", "think", starts_in_reasoning=starts_inside)

    assert (whole.reasoning, whole.content) == (reasoning, content)
    assert answer(list(text), "none", "think", starts_in_reasoning=starts_inside) == whole


def test_call_is_found_behind_reasoning_and_not_within() -> None:
    whole = answer(f"<think>I could {CALL}</think>\n{CALL}", "hermes", "think")

    assert (whole.reasoning, whole.calls) == (f"I could {CALL}", [("add", "{}")])
    assert whole.content == ""


def test_bare_call_is_found_behind_reasoning() -> None:
    whole = answer('<think>hm</think>{"name": "add", "arguments": {}}', "json", "think")

    assert (whole.reasoning, whole.calls) == ("hm", [("add", "{}")])


def test_markers_of_reasoning_may_be_hidden_tokens() -> None:
    hidden = frozenset(["[THINK]", "[/THINK]", "</s>"])
    whole = answer("[THINK]hm[THINK]m[/THINK]Hi[/THINK]</s>", "none", "mistral", hidden=hidden)

    assert (whole.reasoning, whole.content) == ("hmm", "Hi")


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|im_start|>assistant\n<think>\n", ReasoningState.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ReasoningState.CLOSED),
        ("<|im_start|>assistant\n", ReasoningState.NOT_BEGUN),
        ("say <think> twice<|im_end|>", ReasoningState.NOT_BEGUN),
    ],
)
def test_state_of_reasoning_is_what_the_prompt_ends_in(prompt: str, state: ReasoningState) -> None:
    assert THINK.state_after(prompt) is state
    assert MISTRAL_THINK.state_after(prompt) is ReasoningState.NOT_BEGUN
