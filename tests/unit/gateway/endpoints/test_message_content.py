"""Content blocks of Anthropic's API, read from events by the official client."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter
from starlette.responses import JSONResponse

from splitserve_gateway.endpoints import MessageContent
from splitserve_gateway.generation import ChoiceEnd, Delta
from splitserve_gateway.grammars import AnswerPlan
from splitserve_gateway.http import ApiError
from splitserve_text import FORMATS, REASONING_MARKS, OutputFormat, ParserOptions

OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo \\"{}\\" ü"}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "weather", "arguments": {"at": {"city": ["Rome"]}}}\n</tool_call>'
TEXT = f"<think>let me see</think>I look it up.{OSLO}{ROME}"
BLOCKS = [
    ("thinking", "let me see"),
    ("text", "I look it up."),
    ("tool_use", {"city": 'Oslo "{}" ü'}),
    ("tool_use", {"at": {"city": ["Rome"]}}),
]
START = {"role": "assistant", "type": "message", "model": "m", "id": "msg_1", "content": []}
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def content() -> MessageContent:
    form = OutputFormat(FORMATS["hermes"], REASONING_MARKS["think"])
    return MessageContent(AnswerPlan(form, ParserOptions(tools={"weather": {}})))


def pushed(made: MessageContent, text: str, size: int, end: ChoiceEnd) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for start in range(0, len(text), size):
        events += made.push(Delta(0, text[start : start + size], (1,)))
    return [*events, *made.push(Delta(0, "", end=end))]


def accumulated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that the official client reads from `events`."""
    usage = {"input_tokens": 1, "output_tokens": 0}
    start = {"type": "message_start", "message": {**START, "usage": usage}}
    buffers: dict[int, bytes] = {}
    snapshot: Any = None
    for event in (start, *events):
        read = EVENT.validate_python(event)
        snapshot = accumulate_event(event=read, current_snapshot=snapshot, json_bufs=buffers)
    return [block.to_dict() for block in snapshot.content]


def values(blocks: list[dict[str, Any]]) -> list[tuple[str, object]]:
    fields = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [(block["type"], block[fields[block["type"]]]) for block in blocks]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_content_read_from_events_is_the_whole_content(size: int) -> None:
    made = content()

    events = pushed(made, TEXT, size, ChoiceEnd("stop"))

    assert values(made.blocks) == BLOCKS
    assert accumulated(events) == made.blocks
    assert made.blocks[0]["signature"]
    assert made.blocks[2]["id"] != made.blocks[3]["id"]
    assert made.stop() == {"stop_reason": "tool_use", "stop_sequence": None}


def test_content_read_from_events_is_the_same_when_an_answer_is_cut() -> None:
    for length in range(len(TEXT)):
        made = content()

        events = pushed(made, TEXT[:length], 3, ChoiceEnd("length"))

        assert accumulated(events) == made.blocks
        assert made.stop()["stop_reason"] == "max_tokens"
        kinds = [event["type"] for event in events]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop")


@pytest.mark.parametrize(
    ("text", "end", "stop"),
    [
        ("Yes.", ChoiceEnd("stop"), ("end_turn", None)),
        ("Yes.", ChoiceEnd("stop", "\n"), ("stop_sequence", "\n")),
        ("Yes.", ChoiceEnd("stop", 7), ("end_turn", None)),
        (OSLO, ChoiceEnd("stop", "x"), ("stop_sequence", "x")),
        (OSLO, ChoiceEnd("length"), ("max_tokens", None)),
        ("", ChoiceEnd("stop"), ("end_turn", None)),
    ],
)
def test_stop_reason_is_that_of_the_end(
    text: str, end: ChoiceEnd, stop: tuple[str, str | None]
) -> None:
    made = content()
    assert made.stop() == {"stop_reason": None, "stop_sequence": None}

    pushed(made, text, 5, end)

    assert tuple(made.stop().values()) == stop


@pytest.mark.parametrize("arguments", ['{"a": 1e999}', '{"a": "\\ud800"}'])
def test_input_is_wrapped_when_json_cannot_express_it(arguments: str) -> None:
    made = content()
    call = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'

    pushed(made, call, 1000, ChoiceEnd("stop"))

    assert values(made.blocks) == [("tool_use", {"INVALID_JSON": arguments})]
    assert JSONResponse(made.blocks).status_code == 200


def test_content_ends_with_an_error_when_an_operator_ends_the_request() -> None:
    made = content()

    with pytest.raises(ApiError, match="operator") as ended:
        list(made.push(Delta(0, "Once", end=ChoiceEnd("abort"))))

    assert (ended.value.status, ended.value.code) == (422, "aborted")
    assert made.blocks == [{"type": "text", "text": "Once"}]
