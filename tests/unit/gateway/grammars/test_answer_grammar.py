"""Grammars that the caller asks for, with tools and reasoning."""

from __future__ import annotations

import json

import pytest

from splitserve_gateway.grammars import (
    ANY_OBJECT,
    Gbnf,
    GrammarChecker,
    RequestedGrammar,
    Source,
    ToolUse,
    plan_answer,
)
from splitserve_text import Choices, JsonSchema, Lark, ReasoningState, Regex
from tests.unit.gateway.grammars.answer_rules import (
    POINT,
    WRITTEN,
    grammar_of,
    rules,
    tools,
    use_of,
)
from tests.unit.gateway.grammars.byte_model import accepts

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOURCES: list[tuple[Source, str, str]] = [
    (JsonSchema(json.dumps(POINT)), '{"x": 3}', '{"x": "3"}'),
    (Regex('a/b\\/"\nc|\\n{2}'), 'a/b/"\nc', "a/b"),
    (Choices(('yes "sir"', "no\n")), 'yes "sir"', "yes"),
    (Lark('start: foo+\nfoo: "x}" | /[0-9]/\n// done'), "x}7", "x"),
    (Gbnf('root ::= "a" digit+ # c\ndigit ::= [0-9]'), "a17", "a"),
]


@pytest.mark.parametrize(("source", "good", "bad"), SOURCES)
async def test_grammar_says_the_same_wherever_it_is_put(
    checker: GrammarChecker, source: Source, good: str, bad: str
) -> None:
    requested = RequestedGrammar("guided", source)
    auto = use_of(tools(), "auto", None)

    plain = await grammar_of(checker, rules("hermes", ToolUse(), requested=requested))
    assert accepts(plain, good)
    assert not accepts(plain, bad)

    with_tools = await grammar_of(checker, rules("hermes", auto, requested=requested))
    assert accepts(with_tools, good)
    assert accepts(with_tools, WRITTEN["hermes"])
    assert not accepts(with_tools, bad)
    assert not accepts(with_tools, good + WRITTEN["hermes"])

    thinking = await grammar_of(checker, rules("hermes", auto, "think", requested=requested))
    assert accepts(thinking, f"<think>\n{bad} <b></think>\n\n{good}")
    assert accepts(thinking, good)
    assert not accepts(thinking, f"<think>{good}</think>{bad}")
    assert not accepts(thinking, f"<think>{good}")

    state = ReasoningState.OPEN
    asked = rules("hermes", auto, "think", requested=requested, reasoning_state=state)
    inside = await grammar_of(checker, asked)
    assert accepts(inside, f"hm {bad}</think>{good}")
    assert not accepts(inside, good)

    state = ReasoningState.CLOSED
    asked = rules("none", ToolUse(), "think", requested=requested, reasoning_state=state)
    assert await grammar_of(checker, asked) == plain


@pytest.mark.parametrize("schema", ["true", "{}", " { } ", '{"type": "object"}', json.dumps(POINT)])
async def test_json_has_little_white_space(checker: GrammarChecker, schema: str) -> None:
    requested = RequestedGrammar("guided_json", JsonSchema(schema))
    grammar = await grammar_of(checker, rules("hermes", ToolUse(), requested=requested))

    for text in ('{"x":1}', '{"x": 1}', '{ "x" : 1 }'):
        assert accepts(grammar, text)
    for text in ('{"x":  1}', '{\n"x": 1}', ' {"x": 1}', '{"x": 1} '):
        assert not accepts(grammar, text)
    calls = await grammar_of(checker, rules("hermes", use_of(tools(), "required", None)))
    assert not accepts(calls, WRITTEN["hermes"].replace(": 1", ":  1"))


async def test_requested_grammar_is_not_asked_of_calls_that_are_required(
    checker: GrammarChecker,
) -> None:
    asked = rules(
        "json",
        use_of(tools(), "required", False),
        requested=RequestedGrammar("response_format", ANY_OBJECT),
    )
    grammar = await grammar_of(checker, asked)

    assert not accepts(grammar, "{}")


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_answer_is_free_when_nothing_is_asked_of_it(
    checker: GrammarChecker, choice: str
) -> None:
    use = use_of(tools(), choice, None)

    assert (await plan_answer(checker.of(""), rules("hermes", use, "think"))).grammar is None
