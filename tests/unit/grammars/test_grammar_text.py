"""Texts for llguidance, and those grammars that never become one."""

from __future__ import annotations

import json
import sys

import llguidance
import pytest

from splitserve_grammars.llguidance_text import GrammarInvalid, grammar_text, lark_of_gbnf


def matcher(kind: str, *texts: str) -> llguidance.LLMatcher:
    made = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), grammar_text(kind, texts), log_level=0
    )
    assert not made.is_error(), made.get_error()
    return made


def accepts(kind: str, *texts: str, text: str) -> bool:
    made = matcher(kind, *texts)
    ids = list(text.encode())
    return bool(made.try_consume_tokens(ids) == len(ids) and made.is_accepting())


def test_grammar_is_that_of_its_kind() -> None:
    assert accepts("json_schema", '{"type": "integer"}', text="17")
    assert not accepts("json_schema", '{"type": "integer"}', text='"17"')
    assert accepts("regex", "a/b+", text="a/bb")
    assert accepts("lark", 'start: "a" | "b"', text="b")
    assert accepts("choices", 'a "b"', "ß\n", text="ß\n")


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", "{nope", "not valid JSON"),
        ("json_schema", '{"const": "\\ud800"}', "surrogate"),
        ("json_schema", '{"\\udfff": 1}', "surrogate"),
        ("json_schema", '{"maximum": NaN}', "NaN"),
        ("json_schema", '{"maximum": 1e999}', "too large"),
        ("json_schema", "[]", "neither an object"),
        ("json_schema", nested(100_000), "deeply"),
        ("json_schema", '{"x-guidance": {}}', "x-guidance"),
        ("regex", "\ud800", "surrogate"),
        ("lark", "start: \ud800", "surrogate"),
        ("choices", "\ud800", "surrogate"),
        ("lark", "start: @top", "@top"),
        ("lark", 'start: "a" @output | "b"', "@output"),
        ("lark", "start: x\nx: /a\nb/ @output /c/", "@output"),
        ("lark", 'start: %lark { start: @output }\nx: "@"', "@output"),
        ("lark", 'start: %json {"x-guidance": {"lenient": true}}', "x-guidance"),
        ("lark", 'start: %json\n{"\\u0078-guidance": {"coerce_one_of": true}}', "x-guidance"),
        ("lark", 'start: %json {"x-guidance": 1}', "x-guidance"),
        ("lark", "start: %json {}\nx: %json {", "not valid JSON"),
        ("lark", "start: %json " + nested(100_000), "deeply"),
    ],
)
def test_grammar_is_refused_by_name(kind: str, text: str, why: str) -> None:
    with pytest.raises(GrammarInvalid, match=why):
        grammar_text(kind, [text])


def test_schema_is_refused_when_it_can_be_read_and_not_written() -> None:
    """Whatever the depth is, it is a text or refused."""
    outcomes = set()
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 20, 5):
        try:
            json.loads(grammar_text("json_schema", [nested(depth)]))
            outcomes.add("text")
        except GrammarInvalid:
            outcomes.add("refused")
        except RecursionError:
            outcomes.add("json.loads of the test")
    assert "refused" in outcomes


@pytest.mark.parametrize(
    "text",
    [
        'start: "@top" | /@top\\/ @output/ // @top',
        'start: "a\\"@b"\n// "\n',
        'start: %json {"const": "@top"} "x"',
        'start: %json {"x-guidance": {"whitespace_pattern": "[ ]?"}, "type": "object"}',
        'start: %json {"properties": {"x-guidance": {"type": "object"}}}',
        'start: "%json {\\"x-guidance\\": 1}"',
        'start: "a" # see @home',
        'start: "a"\n# ' + "/\\" * 30_000,
    ],
)
def test_lark_is_taken_when_it_only_looks_so(text: str) -> None:
    matcher("lark", text)


def test_gbnf_is_refused_when_it_becomes_too_long() -> None:
    assert accepts("lark", lark_of_gbnf('root ::= "a" | "b"'), text="a")
    with pytest.raises(GrammarInvalid, match="65536 bytes"):
        lark_of_gbnf("root ::= " + " ".join(["[a-z]"] * 11_000))
    with pytest.raises(GrammarInvalid, match="not valid GBNF"):
        lark_of_gbnf("root ::= [a")
