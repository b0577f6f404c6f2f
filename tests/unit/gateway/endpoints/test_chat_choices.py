"""Choices of chats as JSON: streamed pieces add up to the whole."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve_client import Tokenizer
from splitserve_gateway.endpoints import ChatChoice, TokenNames
from splitserve_gateway.generation import ChoiceEnd, Delta
from splitserve_gateway.grammars import AnswerPlan
from splitserve_gateway.schemas import ChatRequest
from splitserve_text import OutputFormat, ParserOptions, TokenLogprob
from tests.support.models import tiny_tokenizers

NAMES = TokenNames(
    Tokenizer.from_files({"tokenizer.json": tiny_tokenizers.byte_level().to_str().encode()})
)
FORM = AnswerPlan(
    OutputFormat.of("", "hermes", "think"), ParserOptions(tools={"add": {}, "drop": {}})
)
TEXT = (
    "<think>Let me see.</think>Here: "
    '<tool_call>\n{"name": "add", "arguments": {"a": [1, "ü"]}}\n</tool_call>'
    '<tool_call>{"name": "drop", "arguments": {}}</tool_call>'
)


def new_choice(**fields: Any) -> ChatChoice:  # noqa: ANN401
    return ChatChoice(0, ChatRequest(**fields), FORM, NAMES)


def deltas(text: str, cuts: list[int]) -> list[Delta]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    return [*(Delta(0, piece, (1,)) for piece in pieces), Delta(0, "", end=ChoiceEnd("stop"))]


@settings(deadline=None, max_examples=50)
@given(cuts=st.lists(st.integers(0, 1000), max_size=30))
def test_pieces_add_up_wherever_the_text_is_cut(cuts: list[int]) -> None:
    whole, streamed = new_choice(), new_choice()
    content, reasoning = "", ""
    calls: list[dict[str, str]] = []
    reasons: list[object] = []
    for delta in deltas(TEXT, cuts):
        whole.add(delta)
        for chunk in streamed.chunks(delta):
            told: Any = chunk["delta"]
            content += told.get("content", "")
            reasoning += told.get("reasoning_content", "")
            assert told.get("reasoning") == told.get("reasoning_content")
            assert len(told.get("tool_calls", ())) <= 1  # some clients read only the first
            for call in told.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
            reasons.append(chunk["finish_reason"])
    message: Any = whole.whole()["message"]
    assert message["content"] == content == "Here: "
    assert message["reasoning"] == reasoning == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == calls
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("add", {"a": [1, "ü"]}),
        ("drop", {}),
    ]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


@pytest.mark.parametrize(
    ("reason", "text", "expected"),
    [
        ("stop", TEXT, "tool_calls"),
        ("length", TEXT, "length"),
        ("stop", "Hello", "stop"),
    ],
)
def test_finish_reason_is_tool_calls_when_stopped_after_calls(
    reason: str, text: str, expected: str
) -> None:
    choice = new_choice()
    choice.add(Delta(0, text))
    choice.add(Delta(0, "", end=ChoiceEnd(reason)))
    assert choice.whole()["finish_reason"] == expected


def test_nothing_is_told_of_a_delta_that_brings_nothing() -> None:
    assert new_choice().chunks(Delta(0, "", (5,))) == []
    (chunk,) = new_choice(return_token_ids=True).chunks(Delta(0, "", (5,)))
    assert chunk["token_ids"] == (5,)


def test_scores_and_tokens_are_told_once_when_a_delta_has_two_calls() -> None:
    choice = new_choice(return_token_ids=True, logprobs=True)
    scores = (TokenLogprob(5, -0.5, 1, ()), TokenLogprob(6, -0.25, 1, ()))

    events: list[Any] = choice.chunks(Delta(0, TEXT, (5, 6), scores, ChoiceEnd("stop")))

    first, second = events
    assert first["delta"]["content"] == "Here: "
    assert [call["function"]["name"] for call in first["delta"]["tool_calls"]] == ["add"]
    assert len(first["logprobs"]["content"]) == 2
    assert (first["token_ids"], first["finish_reason"]) == ((5, 6), None)
    assert [call["function"]["name"] for call in second["delta"]["tool_calls"]] == ["drop"]
    assert (second["logprobs"], second["finish_reason"]) == (None, "tool_calls")
    assert "token_ids" not in second
