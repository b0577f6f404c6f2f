"""What an answer may be: llguidance's matcher says it, and the parser and jsonschema agree."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import jsonschema
import pytest

from splitserve_client.types import Choices, JsonSchema, Lark, Regex
from splitserve_gateway.grammars.checker import GrammarChecker
from splitserve_gateway.grammars.preparation import AnswerRules, answer_grammar
from splitserve_gateway.grammars.requested import (
    ANY_OBJECT,
    Gbnf,
    GrammarRefused,
    RequestedGrammar,
    Source,
)
from splitserve_gateway.grammars.tools import ToolUse, tool_use
from splitserve_gateway.parsing.formats import FORMATS
from splitserve_gateway.parsing.output_format import OutputFormat
from splitserve_gateway.parsing.output_parser import OutputParser, ParserOptions
from splitserve_gateway.parsing.reasoning import REASONING_MARKS, ReasoningState
from tests.unit.gateway.grammars.byte_model import SPECIAL_TOKENS, accepts, drawn
from tests.unit.gateway.parsing.answers import Answer

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "40"))
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "label": {"enum": ["a", "<b>", '"']}},
    "required": ["x"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/node"}, "n": {"type": "boolean"}},
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}},
            "additionalProperties": False,
        }
    },
}
SCHEMAS = {"point": POINT, "tree": TREE}


def tools(*, strict: bool = False, **schemas: object) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": schema, "strict": strict},
        }
        for name, schema in (schemas or SCHEMAS).items()
    ]


def rules(
    format_name: str,
    use: ToolUse,
    reasoning: str = "none",
    *,
    special: bool = False,
    **more: Any,  # noqa: ANN401
) -> AnswerRules:
    return AnswerRules(
        OutputFormat(FORMATS.get(format_name), REASONING_MARKS.get(reasoning)),
        tool_use=use,
        special_tokens=SPECIAL_TOKENS if special else {},
        **more,
    )


def parsed(text: str, asked: AnswerRules) -> Answer:
    parser = OutputParser(
        asked.output_format,
        ParserOptions(
            tools=asked.tool_use.parameters,
            streams_arguments=True,
            starts_in_reasoning=asked.reasoning_state is ReasoningState.OPEN,
            hidden=frozenset(asked.special_tokens),
        ),
    )
    answer = Answer()
    for delta in [delta for char in text for delta in parser.push(char)] + parser.finish():
        answer.add(delta)
    return answer


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("format_name", list(FORMATS))
async def test_answer_is_calls_when_calls_are_required(
    checker: GrammarChecker, format_name: str, parallel: bool, special: bool
) -> None:
    asked = rules(format_name, tool_use(tools(), "required", parallel), special=special)
    grammar = await answer_grammar(checker, asked)
    assert grammar is not None
    rng = random.Random(7)
    num_ended = 0

    for _ in range(NUM_EXAMPLES // 4):
        text = drawn(grammar, rng)
        if text is None:
            continue
        num_ended += 1
        answer = parsed(text, asked)
        assert answer.content == ""
        assert len(answer.calls) >= 1
        assert parallel or len(answer.calls) == 1
        for name, arguments in answer.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert num_ended


@pytest.mark.parametrize("format_name", list(FORMATS))
async def test_answer_calls_the_tool_that_is_named(
    checker: GrammarChecker, format_name: str
) -> None:
    use = tool_use(tools(), {"type": "function", "function": {"name": "tree"}}, None)
    asked = rules(format_name, use)
    grammar = await answer_grammar(checker, asked)
    assert grammar is not None

    names = {
        name
        for seed in range(3)
        if (text := drawn(grammar, random.Random(seed))) is not None
        for name, _ in parsed(text, asked).calls
    }
    assert names == {"tree"}


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "point", "arguments": {"x": 1}}\n</tool_call>',
    "llama3_json": '{"name": "point", "parameters": {"x": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "point", "arguments": {"x": 1}}]',
    "mistral_args": '[TOOL_CALLS]point[ARGS]{"x": 1}',
    "json": '{"name": "point", "arguments": {"x": 1}}',
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("format_name", list(FORMATS))
async def test_call_is_spelled_as_models_learnt_it(
    checker: GrammarChecker, format_name: str, special: bool
) -> None:
    use = tool_use(tools(), "required", False)
    grammar = await answer_grammar(checker, rules(format_name, use, special=special))
    assert grammar is not None
    text = WRITTEN[format_name]

    assert accepts(grammar, text, special=special)
    assert not accepts(grammar, text.replace("1", '"1"'), special=special)
    assert not accepts(grammar, text.replace("point", "pointed"), special=special)
    assert not accepts(grammar, f"Well: {text}", special=special)
    assert not accepts(grammar, "", special=special)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("format_name", ["hermes", "mistral_args"])
async def test_strict_tools_are_held_to_their_schemas_when_text_is_free(
    checker: GrammarChecker, format_name: str, special: bool
) -> None:
    use = tool_use(tools(strict=True), "auto", None)
    grammar = await answer_grammar(checker, rules(format_name, use, special=special))
    assert grammar is not None
    call = WRITTEN[format_name]

    assert accepts(grammar, "", special=special)
    assert accepts(grammar, "Hello\n{}", special=special)
    assert accepts(grammar, f"Hm. {call}\n{call} So.", special=special)
    assert not accepts(grammar, f"Hm. {call.replace('1', 'null')}", special=special)
    assert not accepts(grammar, f"Hm. {call[:20]}", special=special)


@pytest.mark.parametrize("format_name", ["llama3_json", "json", "mistral"])
async def test_answer_is_free_when_strict_calls_cannot_be_told_from_text(
    checker: GrammarChecker, format_name: str
) -> None:
    use = tool_use(tools(strict=True), "auto", None)

    assert await answer_grammar(checker, rules(format_name, use)) is None


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_answer_is_free_when_nothing_is_asked_of_it(
    checker: GrammarChecker, choice: str
) -> None:
    use = tool_use(tools(), choice, None)

    assert await answer_grammar(checker, rules("hermes", use, "think")) is None


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
    auto = tool_use(tools(), "auto", None)

    plain = await answer_grammar(checker, rules("hermes", ToolUse(), requested=requested))
    assert plain is not None
    assert accepts(plain, good)
    assert not accepts(plain, bad)

    with_tools = await answer_grammar(checker, rules("hermes", auto, requested=requested))
    assert with_tools is not None
    assert accepts(with_tools, good)
    assert accepts(with_tools, WRITTEN["hermes"])
    assert not accepts(with_tools, bad)
    assert not accepts(with_tools, good + WRITTEN["hermes"])

    for special in (False, True):
        thinking = await answer_grammar(
            checker, rules("hermes", auto, "think", requested=requested, special=special)
        )
        assert thinking is not None
        assert accepts(thinking, f"<think>\n{bad} <b></think>\n\n{good}", special=special)
        assert accepts(thinking, good, special=special)
        assert not accepts(thinking, f"<think>{good}</think>{bad}", special=special)
        assert not accepts(thinking, f"<think>{good}", special=special)

        inside = await answer_grammar(
            checker,
            rules(
                "hermes",
                auto,
                "think",
                requested=requested,
                special=special,
                reasoning_state=ReasoningState.OPEN,
            ),
        )
        assert inside is not None
        assert accepts(inside, f"hm {bad}</think>{good}", special=special)
        assert not accepts(inside, good, special=special)

    closed = await answer_grammar(
        checker,
        rules(
            "none", ToolUse(), "think", requested=requested, reasoning_state=ReasoningState.CLOSED
        ),
    )
    assert closed == plain


async def test_required_calls_come_after_reasoning(checker: GrammarChecker) -> None:
    asked = rules(
        "hermes",
        tool_use(tools(), "required", None),
        "think",
        reasoning_state=ReasoningState.OPEN,
    )
    grammar = await answer_grammar(checker, asked)
    assert grammar is not None
    text = f"I call <tool_call></think>\n\n{WRITTEN['hermes']}"

    assert accepts(grammar, text)
    assert not accepts(grammar, WRITTEN["hermes"])
    assert parsed(text, asked).calls == [("point", '{"x": 1}')]


async def test_schema_is_any_object_when_it_cannot_be_compiled_and_is_not_strict(
    checker: GrammarChecker,
) -> None:
    odd = {"type": "object", "not": {"required": ["a"]}}
    asked = rules("hermes", tool_use(tools(odd=odd, point=POINT), "required", None))
    grammar = await answer_grammar(checker, asked)
    assert grammar is not None
    text = '<tool_call>\n{"name": "odd", "arguments": {"b": [1]}}\n</tool_call>'

    assert accepts(grammar, text)
    assert accepts(grammar, WRITTEN["hermes"])
    assert not accepts(grammar, WRITTEN["hermes"].replace("1", "[1]"))


async def test_schema_is_refused_by_its_field_when_strict(checker: GrammarChecker) -> None:
    odd = {"type": "object", "not": {"required": ["a"]}}
    for choice in ("required", "auto"):
        asked = rules("hermes", tool_use(tools(strict=True, p=POINT, odd=odd), choice, None))
        with pytest.raises(GrammarRefused, match="not") as refused:
            await answer_grammar(checker, asked)
        assert refused.value.field == "tools[1].function.parameters"


async def test_schemas_are_any_object_when_they_are_too_large_together(
    checker: GrammarChecker,
) -> None:
    large = {"type": "object", "properties": {"a": {"enum": ["x" * 20_000]}}, "required": ["a"]}
    many: dict[str, Any] = {f"f{index}": large for index in range(5)}
    grammar = await answer_grammar(
        checker, rules("json", tool_use(tools(**many), "required", None))
    )
    assert grammar is not None

    assert accepts(grammar, '[{"name": "f3", "arguments": {}}]')
    use = tool_use(tools(strict=True, **many), "required", None)
    with pytest.raises(GrammarRefused) as refused:
        await answer_grammar(checker, rules("json", use))
    assert refused.value.field == "tools"


async def test_call_is_refused_when_the_notation_is_not_known(checker: GrammarChecker) -> None:
    with pytest.raises(GrammarRefused) as refused:
        await answer_grammar(checker, rules("none", tool_use(tools(), "required", None)))
    assert refused.value.field == "tool_choice"


async def test_requested_grammar_is_not_asked_of_calls_that_are_required(
    checker: GrammarChecker,
) -> None:
    asked = rules(
        "json",
        tool_use(tools(), "required", False),
        requested=RequestedGrammar("response_format", ANY_OBJECT),
    )
    grammar = await answer_grammar(checker, asked)

    assert grammar is not None
    assert not accepts(grammar, "{}")
