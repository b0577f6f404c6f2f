"""Properties of the output parser, for any text and any chunks."""

from __future__ import annotations

import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve_text import FORMATS, REASONING_MARKS
from tests.unit.text.parsing.answers import answer, make_parser

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "40"))
WRITTEN_FORMATS = ("hermes", "llama3_json", "mistral", "json")
FORMAT_NAMES = (*FORMATS, "none")
MARKERS = sorted(
    {text for each in FORMATS.values() for text in each.marker_texts}
    | {text for each in REASONING_MARKS.values() for text in each.marker_texts}
)
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>",
    "</parameter>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>",
    '{"name": "add", "arguments": {"a": 1}}', '{"name": "add"', '"arguments": {', "}", "{", "[",
    "]", ",", ":", ";", '"', "\\", "\\u12", " ", "\n", "add", "12", "-0.5e3", "null", "<", "</tool",
    "é", "🙂", "call:add{a:", "add(a=", "functions.add:0", "to=functions.add", "'", "analysis",
    '<invoke name="add">', '<parameter name="a">', "</invoke>", "<arg_key>a</arg_key>",
    "<arg_value>", "</arg_value>", "True", "=", ")", "(",
]  # fmt: skip
texts = st.lists(
    st.one_of(st.sampled_from(FRAGMENTS), st.sampled_from(MARKERS), st.text(max_size=3)),
    max_size=25,
).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(FRAGMENTS),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
calls = st.lists(
    st.tuples(
        st.sampled_from(["get_weather", "add"]),
        st.builds(
            lambda value, indent, is_ascii: json.dumps(value, indent=indent, ensure_ascii=is_ascii),
            st.dictionaries(st.text(max_size=4), json_values, max_size=3),
            st.sampled_from([None, 1]),
            st.booleans(),
        ),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    places = draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def written(format_name: str, made: list[tuple[str, str]]) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in made]
    match format_name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
        case "llama3_json":
            return "; ".join(objects)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in made)
    return f"[{', '.join(objects)}]"


@given(
    data=st.data(),
    text=texts,
    format_name=st.sampled_from(FORMAT_NAMES),
    reasoning=st.sampled_from(["none", *REASONING_MARKS]),
    starts_inside=st.booleans(),
    hidden=st.frozensets(st.sampled_from(MARKERS), max_size=3),
)
@settings(max_examples=NUM_EXAMPLES)
def test_answer_is_the_same_when_its_text_is_cut_anywhere(
    data: st.DataObject,
    text: str,
    format_name: str,
    reasoning: str,
    starts_inside: bool,
    hidden: frozenset[str],
) -> None:
    options = {
        "starts_in_reasoning": starts_inside,
        "hidden": hidden,
    }
    whole = answer(text, format_name, reasoning, **options)

    assert answer(data.draw(cuts(text)), format_name, reasoning, **options) == whole
    assert answer(list(text), format_name, reasoning, **options) == whole


@given(
    text=texts, format_name=st.sampled_from([each for each in FORMAT_NAMES if each != "harmony"])
)
@settings(max_examples=NUM_EXAMPLES)
def test_nothing_is_lost_whatever_the_text(text: str, format_name: str) -> None:
    whole = answer(text, format_name)

    if not whole.calls:
        assert whole.content == text
    for _, arguments in whole.calls:
        assert arguments.startswith("{")


@given(data=st.data(), made=calls, format_name=st.sampled_from(WRITTEN_FORMATS))
@settings(max_examples=NUM_EXAMPLES)
def test_calls_are_found_as_they_were_made(
    data: st.DataObject, made: list[tuple[str, str]], format_name: str
) -> None:
    text = written(format_name, made)
    whole = answer(data.draw(cuts(text)), format_name)

    assert (whole.calls, whole.content) == (made, "")


@given(
    data=st.data(),
    made=calls,
    format_name=st.sampled_from(["llama3_json", "json"]),
    is_array=st.booleans(),
    prose=st.lists(
        st.sampled_from([each for each in FRAGMENTS if each != "<|python_tag|>"]), max_size=6
    ).map("".join),
)
@settings(max_examples=NUM_EXAMPLES)
def test_what_follows_bare_calls_is_content_whatever_it_is(
    data: st.DataObject,
    made: list[tuple[str, str]],
    format_name: str,
    is_array: bool,
    prose: str,
) -> None:
    if not is_array:  # what may stand between calls, and then a call, is one
        prose = prose.lstrip(" \n,;{")
    text = written("json" if is_array else "llama3_json", made) + prose
    whole = answer(data.draw(cuts(text)), format_name)

    assert (whole.calls, whole.content) == (made, "" if prose.isspace() else prose)


@pytest.mark.parametrize("format_name", ["llama3_json", "json"])
@pytest.mark.parametrize(
    ("text", "num_calls", "content"),
    [
        ("CALL is the call.", 1, " is the call."),
        ("CALL; so be it", 1, "; so be it"),
        ("CALL\n\nThen:\nCALL", 1, "\n\nThen:\nCALL"),
        ("CALL;CALL\nend CALL", 2, "\nend CALL"),
        ("CALL {}", 1, " {}"),
        ('CALL {"name": "never_heard_of", "parameters": {}}', 1, None),
        ("CALL \n", 1, ""),
        ("[CALL] so", 1, " so"),
        ("[CALL, so", 1, ", so"),
        ("So: CALL", 0, "So: CALL"),
    ],
)
def test_prose_beside_bare_calls_stays(
    format_name: str, text: str, num_calls: int, content: str | None
) -> None:
    call = '{"name": "add", "parameters": {"a": 1}}'
    expected = text.removeprefix("CALL") if content is None else content
    whole = answer(list(text.replace("CALL", call)), format_name)
    assert whole.calls == [("add", '{"a": 1}')] * num_calls
    assert whole.content == expected.replace("CALL", call)


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "<",
        '<tool_call>{"name": "',
        "<tool_call><function=f><parameter=a>",
        '<tool_call>{"name": "add"}</tool_call>',
        "\n",
        '{"a":',
    ],
)
def test_time_is_linear_in_the_text(unit: str) -> None:
    def seconds(num_chars: int) -> float:
        text = unit * (num_chars // len(unit))
        parser = make_parser("hermes", "think")
        begin = time.thread_time()  # of nobody else
        for start in range(0, len(text), 4):
            parser.push(text[start : start + 4])
        parser.finish()
        return time.thread_time() - begin

    short = min(seconds(4_000) for _ in range(5))
    assert min(seconds(100_000) for _ in range(2)) < 125 * short  # 25 times; squared it were 625
