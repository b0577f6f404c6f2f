"""Tool calls in each notation."""

from __future__ import annotations

import json
import re

import pytest

from splitserve_text import HERMES, MISTRAL, ContentDelta, ToolCallArguments, ToolCallStart
from tests.unit.text.parsing.answers import answer, make_parser

PARIS = '{"city": "Paris"}'
WEATHER = ("get_weather", PARIS)
ADD = ("add", '{"a":1,"b":[2,{"c":"}\\"]"}]}')


def as_object(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(name: str, arguments: str) -> str:
    return f"<tool_call>\n{as_object(name, arguments)}\n</tool_call>"


CALLS = [
    ("hermes", hermes(*WEATHER), [WEATHER]),
    ("hermes", f"{hermes(*WEATHER)}\n{hermes(*ADD)}", [WEATHER, ADD]),
    ("hermes", hermes(*WEATHER).replace("\n", ""), [WEATHER]),
    ("hermes", hermes(*WEATHER).removesuffix("</tool_call>"), [WEATHER]),
    ("hermes", hermes(*WEATHER).removesuffix("</tool_call>") + hermes(*ADD), [WEATHER, ADD]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "add"}</tool_call>', [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"id": 7, "name": "add", "arguments": {}}', [("add", "{}")]),
    ("hermes", hermes("never_heard_of", "{}"), [("never_heard_of", "{}")]),
    ("hermes", hermes("add", '{"ä": "\\u00e9\\n"}'), [("add", '{"ä": "\\u00e9\\n"}')]),
    ("llama3_json", as_object(*WEATHER, "parameters"), [WEATHER]),
    ("llama3_json", " \n" + as_object(*WEATHER), [WEATHER]),
    ("llama3_json", "<|python_tag|>" + as_object(*WEATHER, "parameters"), [WEATHER]),
    ("llama3_json", f'{{"type": "function", {as_object(*WEATHER)[1:]}', [WEATHER]),
    ("llama3_json", f"{as_object(*WEATHER)}; {as_object(*ADD)}", [WEATHER, ADD]),
    ("llama3_json", f"{as_object(*WEATHER)}\n{as_object(*ADD)}", [WEATHER, ADD]),
    ("llama3_json", f"{as_object(*WEATHER)}, {as_object(*ADD)}", [WEATHER, ADD]),
    ("mistral", f"[TOOL_CALLS] [{as_object(*WEATHER)}]", [WEATHER]),
    ("mistral", f"[TOOL_CALLS][{as_object(*WEATHER)}, {as_object(*ADD)}]", [WEATHER, ADD]),
    ("mistral", f"[TOOL_CALLS]{as_object(*WEATHER)}", [WEATHER]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", [WEATHER]),
    ("mistral", f"[TOOL_CALLS]get_weather{PARIS}", [WEATHER]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]aB3[ARGS]{PARIS}", [WEATHER]),
    (
        "mistral",
        f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]add[ARGS]{ADD[1]}",
        [WEATHER, ADD],
    ),
    ("json", as_object(*WEATHER), [WEATHER]),
    ("json", f"[{as_object(*WEATHER)},\n{as_object(*ADD)}]\n", [WEATHER, ADD]),
]

NO_CALLS = [
    ("hermes", "Write <tool_call> before it."),
    ("hermes", "<tool_call>"),
    ("hermes", "a <tool_cal"),
    ("hermes", "<tool_call>\n[1, 2]\n</tool_call>"),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", '<tool_call>{"name": "add"'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": NaN}"}</tool_call>'),
    ("hermes", "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>"),
    ("hermes", "<tool_call><function=></function></tool_call>"),
    ("llama3_json", as_object("never_heard_of", "{}")),
    ("llama3_json", '{"name": "add"}'),
    ("llama3_json", '{"answer": {"name": "add", "arguments": {}}}'),
    ("llama3_json", "It is " + as_object(*WEATHER)),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]add"),
    ("mistral", "[TOOL_CALLS]add[ARGS][1]"),
    ("mistral", "[TOOL_CALLS]add[ARGS]5"),
    ("mistral", "[TOOL_CALLS]add[CALL_ID]7{}"),
    ("mistral", "[TOOL_CALLS] add [ARGS]{}"),
    ("json", "[1, 2]"),
    ("json", "[]"),
    ("json", '{"name": "Ann", "arguments": {}}'),
    ("json", '"add"'),
    ("json", "   "),
    ("none", hermes(*WEATHER)),
]


@pytest.mark.parametrize(("format_name", "text", "calls"), CALLS)
def test_calls_are_as_written_when_well_formed(
    format_name: str, text: str, calls: list[tuple[str, str]]
) -> None:
    whole = answer(text, format_name)

    assert (whole.calls, whole.content) == (calls, "")
    assert answer(list(text), format_name) == whole


@pytest.mark.parametrize(("format_name", "text"), NO_CALLS)
def test_text_is_content_when_it_is_no_call(format_name: str, text: str) -> None:
    whole = answer(text, format_name)

    assert whole.calls == []
    assert whole.content == text
    assert answer(list(text), format_name) == whole


MALFORMED = [
    ('{}, "arguments": {}}</tool_call>', "{}", ', "arguments": {}}</tool_call>'),
    ('{"a": NaN}}</tool_call>', '{"a": NaN', "}}</tool_call>"),
    ('{"a": 01}}', '{"a": 01', "}}"),
    ('{"a": 1,}} x', '{"a": 1,', "}} x"),
    ('{"a": "1\n2"}}', '{"a": "1', '\n2"}}'),
    ('{"a": "\\x"}}', '{"a": "', '\\x"}}'),
    ("{}}}</tool_call>", "{}", "}</tool_call>"),
    ("{}} and so on", "{}", " and so on"),
    ('{"a": ' + "[" * 200, '{"a": ' + "[" * 127, "[" * 73),
]


@pytest.mark.parametrize(("rest", "arguments", "content"), MALFORMED)
def test_call_ends_and_text_follows_when_it_turns_out_malformed(
    rest: str, arguments: str, content: str
) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {rest}'
    whole = answer(text, "hermes")

    assert (whole.calls, whole.content) == ([("add", arguments)], content)
    assert answer(list(text), "hermes") == whole


@pytest.mark.parametrize(("format_name", "text", "_calls"), CALLS)
def test_calls_are_content_when_the_request_has_no_tools(
    format_name: str, text: str, _calls: object
) -> None:
    assert answer(text, format_name, tools={}).content == text


def test_content_stays_around_calls_and_space_beside_them_goes() -> None:
    text = f"Let me see.\n\n{hermes(*WEATHER)}\n \n{hermes(*ADD)}\n\nDone. "
    whole = answer(text, "hermes")

    assert whole.content == "Let me see.\n\n\n\nDone. "
    assert whole.calls == [WEATHER, ADD]


def test_calls_go_on_when_one_of_them_is_malformed() -> None:
    broken = '<tool_call>{"name": "add", arguments: {"a": 1}}</tool_call>'
    whole = answer(f"{hermes(*WEATHER)}{broken}{hermes(*ADD)}", "hermes")

    assert whole.content == broken
    assert whole.calls == [WEATHER, ADD]


def test_first_calls_of_an_array_count_when_it_is_cut() -> None:
    whole = answer(f'[TOOL_CALLS] [{as_object(*WEATHER)}, {{"name": "ad', "mistral")

    assert whole.calls == [WEATHER]
    assert whole.content == ', {"name": "ad'


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("a", "12", 12),
        ("a", "twelve", "twelve"),
        ("a", "NaN", "NaN"),
        ("b", "null", None),
        ("b", "7", 7),
        ("note", "12", "12"),
        ("note", "null", None),
        ("items", '["x", {"y": 1}]', ["x", {"y": 1}]),
        ("unknown", "5", "5"),
        ("note", "line 1\nline 2 <b> </par", "line 1\nline 2 <b> </par"),
    ],
)
def test_tagged_call_has_json_of_the_declared_type(key: str, text: str, expected: object) -> None:
    written = (
        f"<tool_call>\n<function=add>\n<parameter={key}>\n{text}\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    whole = answer(written, "hermes")

    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == [
        ("add", {key: expected})
    ]
    assert answer(list(written), "hermes") == whole


def test_further_calls_are_dropped_when_one_is_allowed() -> None:
    whole = answer(f"Hm.{hermes(*WEATHER)}{hermes(*ADD)}", "hermes", max_calls=1)

    assert whole.calls == [WEATHER]
    assert whole.content == "Hm."


def test_arguments_come_as_they_are_written() -> None:
    parser = make_parser("hermes")
    head = '<tool_call>\n{"name": "add", "arguments": '

    assert parser.push(head) == []
    assert parser.push('{"a"') == [ToolCallStart(0, "0", "add"), ToolCallArguments(0, '{"a"')]
    assert parser.push(": 1}") == [ToolCallArguments(0, ": 1}")]
    assert parser.push("}\n</tool_call>") == []
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("rest", "arguments"),
    [
        ('{"a": "hel', '{"a": "hel'),
        ('{"a": "hel\\u12', '{"a": "hel\\u12'),
        ('{"a": 1', '{"a": 1'),
        ('{"a": 1}', '{"a": 1}'),
        ('{"a": 1}}\n</tool_', '{"a": 1}'),
        ('{"a": 1}, "id": "x', '{"a": 1}'),
    ],
)
def test_call_is_cut_when_the_answer_is(rest: str, arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "add", "arguments": {rest}'
    whole = answer(text, "hermes")

    assert (whole.calls, whole.content) == ([("add", arguments)], "")
    assert answer(list(text), "hermes") == whole


def test_content_comes_at_once_when_it_cannot_begin_a_call() -> None:
    parser = make_parser("hermes")

    assert parser.push("Hello <") == [ContentDelta("Hello ")]
    assert parser.push("b> <tool") == [ContentDelta("<b> ")]
    assert parser.push("box") == [ContentDelta("<toolbox")]


def test_json_answer_comes_at_once_when_it_is_no_call() -> None:
    parser = make_parser("json")

    assert parser.push('{"answer"') == [ContentDelta('{"answer"')]
    assert parser.push(": 42") == [ContentDelta(": 42")]


@pytest.mark.parametrize("text", ["[TOOL_CALLS]oops", "a[ARGS]b[TOOL_CALLS] [3]"])
def test_hidden_markers_are_no_content_when_there_is_no_call(text: str) -> None:
    hidden = frozenset(MISTRAL.marker_texts)
    whole = answer(text, "mistral", hidden=hidden)

    assert whole.content == re.sub(r"\[[A-Z_]+\]", "", text)
    assert answer(list(text), "mistral", hidden=hidden) == whole


def test_calls_are_read_when_their_markers_are_hidden() -> None:
    text = f"<s>[TOOL_CALLS]get_weather[ARGS]{PARIS}</s>"
    whole = answer(text, "mistral", hidden=frozenset([*MISTRAL.marker_texts, "<s>", "</s>"]))

    assert (whole.calls, whole.content) == ([WEATHER], "")


def test_calls_are_read_when_parts_of_an_opener_are_hidden() -> None:
    text = '<|action_start|><|plugin|>{"name": "add", "parameters": {}}<|action_end|>'
    hidden = frozenset(["<|action_start|>", "<|plugin|>", "<|action_end|>"])

    for pieces in ([text], list(text)):
        whole = answer(pieces, "internlm2", hidden=hidden)
        assert (whole.calls, whole.content) == ([("add", "{}")], "")
    assert answer(list("a<|plugin|>b"), "internlm2", hidden=hidden).content == "ab"


def test_text_is_content_when_it_is_cut_after_a_call_and_before_the_next() -> None:
    call = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    section = f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    whole = answer(f"{section} So <|tool_calls_section_begin|>", "kimi_k2")

    assert (whole.calls, whole.content) == ([("add", "{}")], " So <|tool_calls_section_begin|>")


def test_ids_are_those_of_the_model_when_its_notation_has_unique_ones() -> None:
    call = "<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    text = "".join(call.format(each) for each in ("7", "8", "7", "x"))
    whole = answer(text, "kimi_k2")

    assert whole.ids == ["functions.add:7", "functions.add:8", "0", "1"]
    assert [name for name, _ in whole.calls] == ["add", "add", "add", "add:x"]


@pytest.mark.parametrize(
    ("format_name", "pieces"),
    [
        (
            "qwen3_coder",
            [
                ("<function=add>\n<parameter=note>\nab", ['{"note": "', "ab"]),
                ("c\n", ["c"]),
                ("d\n</parameter>\n", ["\\nd", '"']),
                ("<parameter=a>\n1", [', "a": ']),
                ("2\n</parameter>", ["12"]),
                ("\n</function>", ["}"]),
            ],
        ),
        (
            "gemma4",
            [
                ('<|tool_call>call:add{note:<|"|>ab', ['{"note": "', "ab"]),
                ('c<|"', ["c"]),
                ("|>,items:[1,2", ['", "items": [1, ']),
                ("3]}", ["23]}"]),
            ],
        ),
        (
            "olmo3",
            [
                ("<function_calls>add(note='ab", ['{"note": "', "ab"]),
                ("c\\", ["c"]),
                ("n', a=1)", ["\\n", '", "a": 1}']),
            ],
        ),
    ],
)
def test_values_come_as_they_are_known(
    format_name: str, pieces: list[tuple[str, list[str]]]
) -> None:
    parser = make_parser(format_name)

    for text, expected in pieces:
        deltas = parser.push(text)
        written = [each.text for each in deltas if isinstance(each, ToolCallArguments)]
        assert "".join(written) == "".join(expected)


def test_ids_are_as_the_format_has_them() -> None:
    mistral = answer(CALLS[20][1], "mistral", new_id=None).ids
    assert [len(each) for each in mistral] == [9, 9]
    assert all(each.isalnum() for each in mistral)
    assert len({HERMES.new_id() for _ in range(100)}) == 100
    assert HERMES.new_id().startswith("call_")
