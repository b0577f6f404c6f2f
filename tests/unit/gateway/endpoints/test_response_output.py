"""Output items of the Responses API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from splitserve_client import Tokenizer, TokenLogprob
from splitserve_gateway.endpoints import ResponseOutput, TokenNames
from splitserve_gateway.generation import ChoiceEnd, Delta
from splitserve_gateway.grammars import AnswerPlan
from splitserve_text import FORMATS, REASONING_MARKS, OutputFormat, ParserOptions
from tests.support.models import tiny_tokenizers

TEXT = (
    "<think>let me see</think>I look it up."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)


FILES = {"tokenizer.json": tiny_tokenizers.byte_level().to_str().encode()}
TOKENIZER = Tokenizer.from_files(FILES)


def output(*, wants_logprobs: bool = False) -> ResponseOutput:
    form = AnswerPlan(
        OutputFormat(FORMATS["hermes"], REASONING_MARKS["think"]),
        ParserOptions(tools={"weather": {}}),
    )
    names = TokenNames(TOKENIZER)
    return ResponseOutput(form, names, TOKENIZER.detokenizer(), wants_logprobs=wants_logprobs)


def told(made: ResponseOutput, text: str, size: int, end: ChoiceEnd | None) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for start in range(0, len(text), size):
        events += made.push(Delta(0, text[start : start + size], (1,)))
    if end is not None:
        events += made.push(Delta(0, "", end=end))
    return events


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_output_has_an_item_for_each_part(size: int) -> None:
    made = output()

    events = told(made, TEXT, size, ChoiceEnd("stop"))

    reasoning, message, first, second = made.items
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me see"}]
    assert message["content"][0]["text"] == "I look it up."  # type: ignore[index]
    calls = [(call["name"], json.loads(str(call["arguments"]))) for call in (first, second)]
    assert calls == [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]
    assert {item["status"] for item in made.items} == {"completed"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == made.items
    for index, item in enumerate(made.items):
        whole = item["arguments"] if "arguments" in item else item["content"][0]["text"]  # type: ignore[index]
        assert whole == "".join(
            event["delta"]
            for event in events
            if event["output_index"] == index and event["type"].endswith(".delta")
        )
    indexes = [event["output_index"] for event in events]
    assert indexes == sorted(indexes)


def test_output_is_incomplete_when_the_answer_was_cut() -> None:
    made = output()

    told(made, "I look", 3, ChoiceEnd("length"))

    assert [item["status"] for item in made.items] == ["incomplete"]


def test_output_is_an_empty_message_when_there_is_no_text() -> None:
    made = output()

    events = told(made, "", 1, ChoiceEnd("stop"))

    assert [event["type"] for event in events] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert made.items[0]["content"][0]["text"] == ""  # type: ignore[index]


def deltas(text: str, size: int) -> list[Delta]:
    """`text` as tokens of the tokenizer, `size` of them at once, with scores, and its end."""
    made = []
    detokenizer = TOKENIZER.detokenizer()
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    for start in range(0, len(token_ids), size):
        some = tuple(token_ids[start : start + size])
        scores = tuple(TokenLogprob(token_id, -1.0, 1, ()) for token_id in some)
        made.append(Delta(0, detokenizer.push(some), some, scores))
    return [*made, Delta(0, detokenizer.finish(), end=ChoiceEnd("stop"))]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(
    ("reasoning", "content"),
    [
        ("<think>let me see</think>", "I look it up."),
        ("<think>let me é see", ""),
        ("", "I <think> look"),
        ("", "  I look"),
    ],
)
def test_reasoning_tokens_are_counted_alike_in_any_chunks(
    reasoning: str, content: str, size: int
) -> None:
    made = output(wants_logprobs=True)
    for delta in deltas(reasoning + content, size):
        for _ in made.push(delta):
            pass

    num_expected = len(TOKENIZER.encode(reasoning, add_special_tokens=False))
    assert made.num_reasoning_tokens == num_expected
    message = made.items[-1]
    if content:
        scores = message["content"][0]["logprobs"]  # type: ignore[index]
        assert "".join(score["token"] for score in scores) == content
    else:
        assert message["type"] == "reasoning"
