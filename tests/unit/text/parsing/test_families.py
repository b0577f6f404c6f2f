"""Calls and reasoning of each family, whole, in chunks and cut."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from splitserve_text import FORMATS, REASONING_MARKS
from tests.unit.text.parsing.answers import Answer, answer, make_parser
from tests.unit.text.parsing.families import FAMILIES, REASONED

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": "object"},
        },
    },
    "add": {
        "type": "object",
        "properties": {
            "numbers": {"type": "array"},
            "exact": {"type": "boolean"},
            "note": {"type": "string"},
        },
    },
    "stop": {"type": "object", "properties": {}},
}
# Markers of all kinds, except where a family has no way to write its own markers in a string.
NASTY = 'São "Paulo" {é} [🙂] \\ it\'s\n1; 2, <b>'
MARKERS = " <tool_call> <|tool_call_end|> [ARGS] ``` <｜tool▁call▁end｜> <think> <|end"  # noqa: RUF001
CALLS = [
    (
        "get_weather",
        {"city": NASTY, "days": 3, "where": {"lat": -1.5, "names": ["a", {"b": None}]}},
    ),
    ("add", {"numbers": [1, [2.5], {"x": '}"]'}], "exact": True, "note": ""}),
    ("stop", {}),
]
SIZES = (1, 2, 7)
# Families whose calls have nothing around them.
WHOLE_ANSWERS = ("Llama 3.1", "Llama 3.2", "Llama 4", "JSON", "JSON as in OpenAI's API")


def in_chunks(text: str, size: int, name: str, reasoning: str = "none") -> Answer:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return answer(pieces, name, reasoning, tools=TOOLS)


def values(whole: Answer) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in whole.calls]


def test_every_format_and_every_mark_has_a_family() -> None:
    assert {name for name, _ in FAMILIES.values()} == set(FORMATS)
    assert REASONED.keys() == REASONING_MARKS.keys()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_calls_are_those_of_the_template(family: str) -> None:
    name, render = FAMILIES[family]
    text = render(CALLS)
    whole = answer(text, name, tools=TOOLS)

    assert values(whole) == CALLS
    assert whole.content == ""
    for size in SIZES:
        assert in_chunks(text, size, name) == whole


@pytest.mark.parametrize("family", list(FAMILIES))
def test_markers_within_strings_are_text(family: str) -> None:
    name, render = FAMILIES[family]
    calls = [("get_weather", {"city": MARKERS, "days": 1}), ("stop", {})]
    text = render(calls)
    whole = answer(text, name, tools=TOOLS)

    assert (values(whole), whole.content) == (calls, "")
    for size in SIZES:
        assert in_chunks(text, size, name) == whole


@pytest.mark.parametrize("family", list(FAMILIES))
def test_cut_answer_has_the_beginning_of_its_calls(family: str) -> None:
    name, render = FAMILIES[family]
    text = render(CALLS)
    whole = answer(text, name, tools=TOOLS)

    for end in range(0, len(text), 5):
        cut = answer(text[:end], name, tools=TOOLS)
        assert in_chunks(text[:end], 1, name) == cut
        num_calls = len(cut.calls)
        assert cut.calls[: num_calls - 1] == whole.calls[: max(0, num_calls - 1)]
        if num_calls:
            called, arguments = cut.calls[-1]
            full_name, full = whole.calls[num_calls - 1]
            assert called == full_name
            assert full.startswith(arguments)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_parts_so_far_do_not_depend_on_chunks(family: str) -> None:
    """A stream that is resumed has its text in one piece, and must not say anything twice."""
    name, render = FAMILIES[family]
    text = f"{'' if family in WHOLE_ANSWERS else 'I look: '}{render(CALLS)}"
    by_character, slowly = make_parser(name, tools=TOOLS), Answer()

    for end, character in enumerate(text, 1):
        for delta in by_character.push(character):
            slowly.add(delta)
        at_once = Answer()
        for delta in make_parser(name, tools=TOOLS).push(text[:end]):
            at_once.add(delta)
        assert at_once == slowly


@pytest.mark.parametrize("family", list(FAMILIES))
def test_calls_are_content_when_their_tools_are_barred(family: str) -> None:
    name, render = FAMILIES[family]
    text = render(CALLS)
    whole = answer(text, name, tools=TOOLS, barred=frozenset(TOOLS))

    assert whole.calls == []
    assert "get_weather" in whole.content
    assert name == "harmony" or whole.content == text


@pytest.mark.parametrize("family", list(FAMILIES))
def test_first_call_is_the_only_one_when_one_is_allowed(family: str) -> None:
    name, render = FAMILIES[family]
    whole = answer(render(CALLS), name, tools=TOOLS, max_calls=1)

    assert (values(whole), whole.content) == (CALLS[:1], "")


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in WHOLE_ANSWERS])
def test_content_stays_before_calls(family: str) -> None:
    name, render = FAMILIES[family]
    text = f"I look, {{so}} [it] is:{render(CALLS[:2])}"
    whole = answer(text, name, tools=TOOLS)

    assert (values(whole), whole.content.rstrip()) == (CALLS[:2], "I look, {so} [it] is:")
    for size in SIZES:
        assert in_chunks(text, size, name) == whole


@pytest.mark.parametrize("reasoning", list(REASONED))
def test_reasoning_comes_before_calls_and_content(reasoning: str) -> None:
    thought = 'I could <tool_call>{"name": "add"} or [TOOL_CALLS] {'
    is_harmony = reasoning == "harmony"
    family = "gpt-oss" if is_harmony else "Qwen3-Coder"
    name, render = FAMILIES[family]
    text = REASONED[reasoning].format(thought) + render(CALLS)
    whole = answer(text, name, reasoning, tools=TOOLS)

    assert (whole.reasoning.strip(), values(whole)) == (thought, CALLS)
    assert whole.content == ""
    for size in SIZES:
        assert in_chunks(text, size, name, reasoning) == whole


def test_reasoning_may_come_again_between_calls() -> None:
    name, render = FAMILIES["MiniMax M2"]
    text = "".join(
        f"<think>{index}</think>\n\n{render([call])}\n" for index, call in enumerate(CALLS)
    )
    whole = answer(text, name, "think", tools=TOOLS)

    assert (whole.reasoning, values(whole), whole.content) == ("012", CALLS, "")


@pytest.mark.parametrize(
    ("reasoning", "text", "content"),
    [
        ("think_answer", "<think>\nhm\n</think>\n<answer>\nHi\n</answer>", "Hi\n"),
        ("think_answer", "<think>hm</think><response>Hi</response>", "Hi"),
        ("think_answer", "<answer>\nHi</answer>", "Hi"),
        ("command", "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>", "Hi"),
        ("command", "<|START_RESPONSE|>Hi<|END_RESPONSE|>", "Hi"),
        ("think", "<answer>Hi</answer>", "<answer>Hi</answer>"),
        ("harmony", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final"
         "<|message|>Hi<|return|>", "Hi"),
        ("harmony", "<|channel|>commentary<|message|>Hi<|end|>", "Hi"),
        ("harmony", "Hi", "Hi"),
    ],
)  # fmt: skip
def test_content_is_without_its_wrapping(reasoning: str, text: str, content: str) -> None:
    whole = answer(text, "none", reasoning)

    assert whole.content == content
    assert answer(list(text), "none", reasoning) == whole


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("unit", ["{", "[", '"', "\\", "<"])
def test_hostile_answers_take_linear_work_and_are_not_lost(name: str, unit: str) -> None:
    opener = (*FORMATS[name].openers, "<|channel|>")[0]
    text = opener + unit * 1_000

    whole = answer(text, name)
    assert in_chunks(text, 3, name).calls == whole.calls
    if not whole.calls and name != "harmony":
        assert whole.content == text
    for rest in ("", '{"name": "add", "arguments": ', "<function=add><parameter=a>", "add(a="):
        head = opener + rest

        assert num_python_calls(name, head, unit, 160) < 40 * num_python_calls(name, head, unit, 8)


def num_python_calls(name: str, head: str, unit: str, num_pieces: int) -> int:
    """Work of parsing `head` and pieces of `unit`."""
    parser = make_parser(name)
    num_calls = 0

    def count(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    sys.setprofile(count)
    try:
        for piece in [head] + [unit * 20] * num_pieces:
            parser.push(piece)
        parser.finish()
    finally:
        sys.setprofile(None)
    return num_calls
