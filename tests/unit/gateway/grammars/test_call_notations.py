"""Grammars of calls accept what model families write, and refuse wrong arguments."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from splitserve_gateway.grammars import AnswerPlan, GrammarChecker, GrammarRefused, plan_answer
from splitserve_text import Grammar
from tests.unit.gateway.grammars.answer_rules import read, rules, tools, use_of
from tests.unit.gateway.grammars.byte_model import accepts, drawn
from tests.unit.text.parsing.families import FAMILIES
from tests.unit.text.parsing.test_families import CALLS, TOOLS

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Families with a notation that grammars spell otherwise, as JSON, or not as every model writes it.
OTHERWISE = {
    "Qwen3-Coder without the outer tag", "Llama 3.1 with python_tag", "Llama 3.1, built-in tools",
    "Llama 4 with python_start", "Llama 4 in JSON", "Functionary", "Mistral v3", "Mistral v13",
    "Kimi K2", "MiniMax M1", "Phi-4-mini, functools", "Granite 20B", "Command R7B, Command A",
    "Command R", "Command R, as its template writes past calls", "InternLM 2", "ERNIE 4.5",
    "GigaChat 3", "GigaChat 3.1", "fence of JSON", "JSON as in OpenAI's API", "gpt-oss",
}  # fmt: skip
SPELLED = [family for family in FAMILIES if family not in OTHERWISE]
TAGS = ("qwen3_coder", "seed_oss", "minimax", "deepseek_dsml", "glm", "hunyuan")
LITERALS = ("olmo3", "lfm2", "llama4", "gemma4")


def object_of(**properties: object) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


async def plan_for(
    checker: GrammarChecker, name: str, schemas: dict[str, Any], choice: str = "required"
) -> AnswerPlan:
    use = use_of(tools(strict=True, **schemas), choice)
    return await plan_answer(checker.of(""), rules(name, use))


def grammar_of(plan: AnswerPlan) -> Grammar:
    assert plan.grammar is not None
    return plan.grammar


def spelled(name: str, **arguments: object) -> str:
    """Returns a call of `f` as a family with the notation `name` writes it."""
    render = next(render for format_name, render in FAMILIES.values() if format_name == name)
    return render([("f", arguments)]).strip()


@pytest.mark.parametrize("family", SPELLED)
async def test_grammar_accepts_what_the_family_writes(checker: GrammarChecker, family: str) -> None:
    """Strings with markers, quotes and braces among them."""
    name, render = FAMILIES[family]
    plan = await plan_for(checker, name, TOOLS)
    text = render(CALLS).strip()

    assert plan.output_format.tool_calls is not None
    assert plan.output_format.tool_calls.name == name
    assert accepts(grammar_of(plan), text)
    assert [(name, json.loads(value)) for name, value in read(text, plan).calls] == CALLS
    for wrong in ({"days": "three"}, {"days": 1.5}, {"where": [1]}):
        assert not accepts(grammar_of(plan), render([("get_weather", wrong)]).strip()), wrong
    assert not accepts(grammar_of(plan), render([("go", {})]).strip())


SCHEMA = object_of(
    word={"type": "string", "minLength": 2, "maxLength": 4},
    code={"type": "string", "pattern": "^[A-Z]+-[0-9]$"},
    kind={"type": "string", "enum": ["a", "b c", "null"]},
    note={"anyOf": [{"type": "string"}, {"type": "null"}]},
    size={"type": "integer", "minimum": 1, "maximum": 3},
    sizes={"type": "array", "items": {"$ref": "#/$defs/size"}, "maxItems": 2},
    point=object_of(x={"type": "number"}, labels={"type": "array", "items": {"type": "string"}}),
) | {"$defs": {"size": {"enum": [1, 2, None]}}}
RIGHT: dict[str, object] = {
    "word": "é\n",
    "code": "AB-1",
    "kind": "b c",
    "note": "a <b> ' \" {}",
    "size": 3,
    "sizes": [1, None],
    "point": {"x": 1.5, "labels": ["<p>", "a\\b"]},
}
OWN_DEFINITIONS = object_of(
    a={"$ref": "#/$defs/same", "$defs": {"same": {"type": "string"}}},
    b={"$ref": "#/definitions/same"},
    c={"type": ["string", "null"], "enum": ["null", "a"]},
    d={"type": "string", "enum": ["null", None]},
) | {"$defs": {"same": {"type": "integer"}}, "definitions": {"same": {"type": "boolean"}}}
CHANGES: list[dict[str, object]] = [{}, {"note": None}, {"note": "null and void"}, {"sizes": []}]
WRONG: list[dict[str, object]] = [
    {"word": "a"}, {"word": "abcde"}, {"code": "AB-"}, {"code": "xAB-1"}, {"code": "AB-1x"},
    {"kind": "c"}, {"size": 4}, {"size": None}, {"sizes": [3]}, {"sizes": [1, 1, 1]},
    {"point": {"x": 1}}, {"point": {"x": "1", "labels": []}}, {"point": {"x": 1, "labels": [1]}},
]  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "minimax", "deepseek_dsml", "glm"])
async def test_values_in_tags_are_those_of_the_schema(checker: GrammarChecker, name: str) -> None:
    plan = await plan_for(checker, name, {"f": SCHEMA})
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid(RIGHT)

    for changes in CHANGES:
        text = spelled(name, **RIGHT | changes)
        assert accepts(grammar_of(plan), text), changes
        ((_, arguments),) = read(text, plan).calls
        assert json.loads(arguments) == RIGHT | changes
    for changes in WRONG:
        assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(RIGHT | changes)
        assert not accepts(grammar_of(plan), spelled(name, **RIGHT | changes)), changes


@pytest.mark.parametrize("name", ["olmo3", "lfm2"])
async def test_literals_are_those_of_the_schema(checker: GrammarChecker, name: str) -> None:
    """Where Python's literals have no rule, JSON stands in their place."""
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"]}}
    del schema["properties"]["word"], schema["properties"]["code"]
    schema["required"] = list(schema["properties"])
    right = {key: value for key, value in RIGHT.items() if key in schema["properties"]}
    plan = await plan_for(checker, name, {"f": schema})

    for changes in CHANGES:
        text = spelled(name, **right | changes)
        assert accepts(grammar_of(plan), text), changes
        ((_, arguments),) = read(text, plan).calls
        assert json.loads(arguments) == right | changes
    for changes in WRONG:
        if changes.keys() <= right.keys():
            assert not accepts(grammar_of(plan), spelled(name, **right | changes)), changes


@pytest.mark.parametrize("name", [*TAGS, *LITERALS])
async def test_references_lead_to_the_schema_of_the_tool(
    checker: GrammarChecker, name: str
) -> None:
    plan = await plan_for(checker, name, {"f": OWN_DEFINITIONS})
    validator = jsonschema.Draft202012Validator(OWN_DEFINITIONS)

    for changes in ({}, {"a": "x"}, {"b": 1}, {"c": None}, {"d": None}):
        text = spelled(name, **{"a": 1, "b": True, "c": "a", "d": "null"} | changes)
        if accepts(grammar_of(plan), text):
            assert validator.is_valid(json.loads(read(text, plan).calls[0][1])), changes
        else:
            assert changes


HARD: dict[str, Any] = {
    "patterned": object_of(a={"type": "string", "pattern": "a|b"}, b={"type": "string"}),
    "dated": object_of(a={"type": "string", "format": "date"}),
    "recursive": {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}, "text": {"type": "string"}},
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    "text": {"type": ["string", "null"]},
                },
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "additionalProperties": False,
    },
    "several": object_of(
        a={"type": ["integer", "string"], "maxLength": 3},
        b={"enum": [1, "x"]},
        c={"const": "c"},
        d={"type": "boolean"},
    ),
    "optional": {
        "type": "object",
        "properties": {
            "a": {"type": "boolean"},
            "b": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "c": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "required": ["b"],
        "additionalProperties": False,
    },
    "nothing": {"type": "object", "properties": {}, "additionalProperties": False},
}


# Free strings end with a text that is rarely drawn.
RARELY_ENDED = {("deepseek_dsml", "patterned"), ("gemma4", "optional")}


@pytest.mark.parametrize("kind", list(HARD))
@pytest.mark.parametrize(
    "name", ["qwen3_coder", "minimax", "deepseek_dsml", "glm", "olmo3", "gemma4"]
)
async def test_drawn_calls_are_read_and_valid(
    checker: GrammarChecker, name: str, kind: str
) -> None:
    """A schema that a notation cannot spell is written as JSON."""
    use = use_of(tools(strict=True, f=HARD[kind]), "required", parallel=False)
    plan = await plan_answer(checker.of(""), rules(name, use))
    rng = random.Random(3)
    drawings = [text for _ in range(4) if (text := drawn(grammar_of(plan), rng, 400)) is not None]

    for text in drawings:
        answer = read(text, plan)
        assert answer.calls, text
        assert answer.content == ""
        for called, arguments in answer.calls:
            assert called == "f"
            jsonschema.validate(json.loads(arguments), HARD[kind])
    assert drawings or kind == "recursive" or (name, kind) in RARELY_ENDED


@pytest.mark.parametrize("name", TAGS)
async def test_no_string_ends_its_parameter(checker: GrammarChecker, name: str) -> None:
    """Also not a string in JSON: the parser looks for the end of the parameter alone."""
    closer = "</arg_value>" if name in ("glm", "hunyuan") else "</parameter>"
    closer = "</｜DSML｜parameter>" if name == "deepseek_dsml" else closer  # noqa: RUF001
    definitions = {"$defs": {"text": {"type": "string"}}}
    items = {"$ref": "#/$defs/text"}
    schema = object_of(a={"type": "string"}, b={"type": "array", "items": items}) | definitions
    plan = await plan_for(checker, name, {"f": schema})

    for text in ("<", "</", "<</para", closer[:-1], "<<" + closer[1:-1] + "<", f"{closer[:-2]}<p>"):
        right = {"a": text, "b": [text]}
        call = spelled(name, **right)
        assert accepts(grammar_of(plan), call), text
        assert json.loads(read(call, plan).calls[0][1]) == right
        assert not accepts(grammar_of(plan), spelled(name, a="", b=[text + closer]))
    assert not accepts(grammar_of(plan), spelled(name, a=closer, b=[]))


@pytest.mark.parametrize("name", ["glm", "gemma4"])
async def test_strict_calls_are_checked_when_the_notation_has_no_way_to_spell_them(
    checker: GrammarChecker, name: str
) -> None:
    schema = object_of(a={"type": "string", "format": "date"})
    plan = await plan_for(checker, name, {"f": schema}, "auto")

    assert plan.grammar is None
    assert plan.ignored == ("tools.0.function.strict",)
    finding = plan.new_finding()
    parser = plan.new_parser()
    finding.add(parser.push(spelled(name, b=1)) + parser.finish())
    found = (await finding.fields())["schema_problem"]
    assert str(found).startswith("tool_calls.0 $: ")


MALFORMED: list[Any] = [
    5, False, {"type": [{}]}, {"type": {}}, {"enum": 5}, {"enum": []}, {"anyOf": {}},
    {"anyOf": [5, {"type": "string"}]}, {"allOf": 5}, {"$ref": 5}, {"$ref": "#/$defs/none"},
    {"type": "string", "pattern": 5}, {"type": "string", "pattern": "a)|(b"},
    {"type": "string", "pattern": "["}, {"type": "string", "minLength": "1}/ | /{"},
    {"type": "array", "minItems": "x"}, {"type": "object", "required": 5},
    {"type": "object", "properties": 5}, {"type": "integer", "minimum": "x"},
]  # fmt: skip
NO_OBJECTS: list[dict[str, Any]] = [
    {"properties": [1]}, {"required": 5}, {"required": [[]]}, {"$defs": [], "properties": {}},
    *({"properties": {"a": each}} for each in MALFORMED),
]  # fmt: skip


@pytest.mark.parametrize("schema", NO_OBJECTS, ids=json.dumps)
async def test_malformed_schemas_are_refused_or_obeyed(
    checker: GrammarChecker, schema: dict[str, Any]
) -> None:
    """The compiler of schemas decides, in each notation alike."""
    outcomes = dict.fromkeys(("json", *TAGS, *LITERALS), "")
    for name in outcomes:
        try:
            await plan_for(checker, name, {"f": {"type": "object", **schema}})
        except GrammarRefused as refused:
            outcomes[name] = refused.field
    assert set(outcomes.values()) <= {"", "tools.0.function.parameters"}
    assert len(set(outcomes.values())) == 1, outcomes
