"""What an answer may be: llguidance's matcher says it, and the parser and jsonschema agree."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from splitserve_client.types import Choices, Grammar, JsonSchema, Lark, Regex
from splitserve_gateway.grammars.answer_plan import AnswerPlan, AnswerRules, plan_answer
from splitserve_gateway.grammars.checker import GrammarChecker
from splitserve_gateway.grammars.requested import (
    ANY_OBJECT,
    Gbnf,
    GrammarRefused,
    RequestedGrammar,
    Source,
)
from splitserve_gateway.grammars.tools import ToolUse
from splitserve_gateway.parsing.formats import FORMATS
from splitserve_gateway.parsing.output_format import OutputFormat
from splitserve_gateway.parsing.reasoning import REASONING_MARKS, ReasoningState
from tests.unit.gateway.grammars.byte_model import accepts, drawn
from tests.unit.gateway.grammars.tool_uses import use_of
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
    **more: Any,  # noqa: ANN401
) -> AnswerRules:
    form = OutputFormat(FORMATS.get(format_name), REASONING_MARKS.get(reasoning))
    return AnswerRules(form, tool_use=use, **more)


async def grammar_of(checker: GrammarChecker, asked: AnswerRules) -> Grammar:
    plan = await plan_answer(checker.of(""), asked)
    assert plan.grammar is not None
    return plan.grammar


def read(text: str, plan: AnswerPlan) -> Answer:
    parser = plan.new_parser()
    answer = Answer()
    for delta in [delta for char in text for delta in parser.push(char)] + parser.finish():
        answer.add(delta)
    return answer


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("format_name", list(FORMATS))
async def test_answer_is_calls_when_calls_are_required(
    checker: GrammarChecker, format_name: str, parallel: bool
) -> None:
    use = use_of(tools(), "required", parallel)
    plan = await plan_answer(checker.of(""), rules(format_name, use))
    assert plan.grammar is not None
    rng = random.Random(7)
    num_ended = 0

    for _ in range(NUM_EXAMPLES // 4):
        text = drawn(plan.grammar, rng)
        if text is None:
            continue
        num_ended += 1
        answer = read(text, plan)
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
    use = use_of(tools(), {"type": "function", "function": {"name": "tree"}}, None)
    plan = await plan_answer(checker.of(""), rules(format_name, use))
    assert plan.grammar is not None

    names = {
        name
        for seed in range(3)
        if (text := drawn(plan.grammar, random.Random(seed))) is not None
        for name, _ in read(text, plan).calls
    }
    assert names == {"tree"}


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "point", "arguments": {"x": 1}}\n</tool_call>',
    "llama3_json": '{"name": "point", "parameters": {"x": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "point", "arguments": {"x": 1}}]',
    "mistral_args": '[TOOL_CALLS]point[ARGS]{"x": 1}',
    "json": '{"name": "point", "arguments": {"x": 1}}',
}


async def test_required_calls_are_so_many_at_most(checker: GrammarChecker) -> None:
    grammar = await grammar_of(checker, rules("hermes", use_of(tools(), "required", None)))

    assert accepts(grammar, "\n".join([WRITTEN["hermes"]] * 32))
    assert not accepts(grammar, "\n".join([WRITTEN["hermes"]] * 33))


@pytest.mark.parametrize("format_name", list(FORMATS))
async def test_call_is_spelled_as_models_learnt_it(
    checker: GrammarChecker, format_name: str
) -> None:
    use = use_of(tools(), "required", False)
    grammar = await grammar_of(checker, rules(format_name, use))
    text = WRITTEN[format_name]

    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace("1", '"1"'))
    assert not accepts(grammar, text.replace("point", "pointed"))
    assert not accepts(grammar, f"Well: {text}")
    assert not accepts(grammar, "")


@pytest.mark.parametrize("format_name", ["hermes", "mistral_args"])
async def test_strict_tools_are_held_to_their_schemas_when_text_is_free(
    checker: GrammarChecker, format_name: str
) -> None:
    use = use_of(tools(strict=True), "auto", None)
    grammar = await grammar_of(checker, rules(format_name, use))
    call = WRITTEN[format_name]

    assert accepts(grammar, "")
    assert accepts(grammar, "Hello\n{}")
    assert accepts(grammar, f"Hm. {call}\n{call} So.")
    assert not accepts(grammar, f"Hm. {call.replace('1', 'null')}")
    assert not accepts(grammar, f"Hm. {call[:20]}")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


@pytest.mark.parametrize("format_name", ["hermes", "mistral_args"])
async def test_grammar_has_calls_of_allowed_tools_alone(
    checker: GrammarChecker, format_name: str
) -> None:
    call = WRITTEN[format_name]
    other = call.replace("point", "tree").replace('{"x": 1}', "{}")

    for mode, is_free in (("auto", True), ("required", False)):
        use = use_of(tools(), allowed(mode, "point"))
        grammar = await grammar_of(checker, rules(format_name, use))
        assert accepts(grammar, call)
        assert accepts(grammar, f"Hm. {call}") is is_free
        assert not accepts(grammar, other)
        assert not accepts(grammar, f"Hm. {other}")


@pytest.mark.parametrize("format_name", list(FORMATS))
async def test_call_is_content_when_its_tool_is_not_allowed(
    checker: GrammarChecker, format_name: str
) -> None:
    call = WRITTEN[format_name]
    other = call.replace("point", "tree").replace('{"x": 1}', "{}")
    use = use_of(tools(), allowed("auto", "point"))
    plan = await plan_answer(checker.of(""), rules(format_name, use))

    assert read(call, plan).calls
    assert not read(other, plan).calls
    assert read(other, plan).content == other


@pytest.mark.parametrize("format_name", ["llama3_json", "json", "mistral"])
async def test_answer_is_free_when_strict_calls_cannot_be_told_from_text(
    checker: GrammarChecker, format_name: str
) -> None:
    use = use_of(tools(strict=True), "auto", None)

    assert (await plan_answer(checker.of(""), rules(format_name, use))).grammar is None


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_answer_is_free_when_nothing_is_asked_of_it(
    checker: GrammarChecker, choice: str
) -> None:
    use = use_of(tools(), choice, None)

    assert (await plan_answer(checker.of(""), rules("hermes", use, "think"))).grammar is None


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


async def test_required_calls_come_after_reasoning(checker: GrammarChecker) -> None:
    use = use_of(tools(), "required", None)
    asked = rules("hermes", use, "think", reasoning_state=ReasoningState.OPEN)
    plan = await plan_answer(checker.of(""), asked)
    assert plan.grammar is not None
    text = f"I call <tool_call></think>\n\n{WRITTEN['hermes']}"

    assert accepts(plan.grammar, text)
    assert not accepts(plan.grammar, WRITTEN["hermes"])
    assert read(text, plan).calls == [("point", '{"x": 1}')]
    assert not plan.shows_markers


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


SPECIAL = frozenset(["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "</s>"])


async def test_required_calls_are_json_when_their_notation_has_special_tokens(
    checker: GrammarChecker,
) -> None:
    use = use_of(tools(), "required", None)
    asked = rules("mistral", use, "mistral", special_tokens=SPECIAL)
    plan = await plan_answer(checker.of(""), replace(asked, reasoning_state=ReasoningState.OPEN))
    assert plan.grammar is not None
    text = f"[{WRITTEN['json']}]"

    assert accepts(plan.grammar, text)
    assert read(text, plan).calls == [("point", '{"x": 1}')]


async def test_required_calls_keep_their_notation_when_it_does_without_its_special_token(
    checker: GrammarChecker,
) -> None:
    use = use_of(tools(), "required", None)
    special = frozenset(["<|python_tag|>", "<|eot_id|>"])
    plan = await plan_answer(checker.of(""), rules("llama3_json", use, special_tokens=special))
    assert plan.grammar is not None

    assert accepts(plan.grammar, WRITTEN["llama3_json"])
    assert plan.shows_markers
    assert read(WRITTEN["llama3_json"] + "<|eot_id|>", plan).content == ""


async def test_markers_are_shown_and_hidden_when_they_are_special_tokens(
    checker: GrammarChecker,
) -> None:
    use = use_of(tools(strict=True), "auto", None)
    asked = rules("mistral_args", use, "mistral", special_tokens=SPECIAL)
    plan = await plan_answer(checker.of(""), asked)
    answer = read(f"[THINK]hm[/THINK]So[ARGS]: {WRITTEN['mistral_args']}</s>", plan)

    assert (plan.grammar, plan.shows_markers) == (None, True)
    assert (answer.reasoning, answer.content) == ("hm", "So: ")
    assert answer.calls == [("point", '{"x": 1}')]
    hermes = rules("hermes", use, "think", special_tokens=SPECIAL)
    assert not (await plan_answer(checker.of(""), hermes)).shows_markers


async def test_call_is_content_when_no_tool_may_be_called(checker: GrammarChecker) -> None:
    plan = await plan_answer(checker.of(""), rules("hermes", use_of(tools(), "none", None)))

    assert read(WRITTEN["hermes"], plan).content == WRITTEN["hermes"]


async def test_schema_is_any_object_when_it_cannot_be_compiled_and_is_not_strict(
    checker: GrammarChecker,
) -> None:
    odd = {"type": "object", "not": {"required": ["a"]}}
    asked = rules("hermes", use_of(tools(odd=odd, point=POINT), "required", None))
    grammar = await grammar_of(checker, asked)
    text = '<tool_call>\n{"name": "odd", "arguments": {"b": [1]}}\n</tool_call>'

    assert accepts(grammar, text)
    assert accepts(grammar, WRITTEN["hermes"])
    assert not accepts(grammar, WRITTEN["hermes"].replace("1", "[1]"))


async def test_schema_is_refused_by_its_field_when_strict(checker: GrammarChecker) -> None:
    odd = {"type": "object", "not": {"required": ["a"]}}
    for choice in ("required", "auto"):
        asked = rules("hermes", use_of(tools(strict=True, p=POINT, odd=odd), choice, None))
        with pytest.raises(GrammarRefused, match="not") as refused:
            await grammar_of(checker, asked)
        assert refused.value.field == "tools.1.function.parameters"


class RefusingChecker(GrammarChecker):
    """Refuses what has "odd" in it, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_refused = 0

    async def check(self, field: str, source: Source, tenant: str = "") -> Grammar:
        assert isinstance(source, Lark)
        if "odd" in source.grammar:
            self.num_refused += 1
            raise GrammarRefused(field, "odd")
        return source


async def test_refused_schemas_cost_no_more_when_there_are_many() -> None:
    odd = {"type": "object", "properties": {"odd": {}}, "required": ["odd"]}
    many: dict[str, Any] = {f"f{index}": odd for index in range(20)} | {"point": POINT}
    checker = RefusingChecker()
    grammar = await grammar_of(checker, rules("json", use_of(tools(**many), "required", False)))

    assert accepts(grammar, '{"name": "f19", "arguments": {"b": 1}}')
    assert checker.num_refused == 4


async def test_schemas_are_any_object_when_they_are_too_large_together(
    checker: GrammarChecker,
) -> None:
    large = {"type": "object", "properties": {"a": {"enum": ["x" * 20_000]}}, "required": ["a"]}
    many: dict[str, Any] = {f"f{index}": large for index in range(5)}
    grammar = await grammar_of(checker, rules("json", use_of(tools(**many), "required", None)))

    assert accepts(grammar, '[{"name": "f3", "arguments": {}}]')
    use = use_of(tools(strict=True, **many), "required", None)
    with pytest.raises(GrammarRefused) as refused:
        await grammar_of(checker, rules("json", use))
    assert refused.value.field == "tools"


async def test_call_is_refused_when_the_notation_is_not_known(checker: GrammarChecker) -> None:
    with pytest.raises(GrammarRefused) as refused:
        await grammar_of(checker, rules("none", use_of(tools(), "required", None)))
    assert refused.value.field == "tool_choice"


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
