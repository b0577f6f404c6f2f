"""Grammars of tool calls agree with llguidance, our parser and jsonschema."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace

import jsonschema
import pytest

from splitserve_gateway.grammars import GrammarChecker, plan_answer
from splitserve_text import ReasoningState
from tests.unit.gateway.grammars.answer_rules import (
    SCHEMAS,
    WRITTEN,
    allowed,
    grammar_of,
    read,
    rules,
    tools,
    use_of,
)
from tests.unit.gateway.grammars.byte_model import accepts, drawn

# Notations whose calls may stand in an answer without a marker.
LOOK_LIKE_TEXT = {"llama3_json", "llama4", "json", "gemma3"}

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "40"))


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("format_name", list(WRITTEN))
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


@pytest.mark.parametrize("format_name", list(WRITTEN))
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


async def test_required_calls_are_so_many_at_most(checker: GrammarChecker) -> None:
    grammar = await grammar_of(checker, rules("hermes", use_of(tools(), "required", None)))

    assert accepts(grammar, "\n".join([WRITTEN["hermes"]] * 32))
    assert not accepts(grammar, "\n".join([WRITTEN["hermes"]] * 33))


@pytest.mark.parametrize("format_name", list(WRITTEN))
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


@pytest.mark.parametrize("format_name", sorted(WRITTEN.keys() - LOOK_LIKE_TEXT))
async def test_strict_tools_keep_their_schemas_when_text_is_free(
    checker: GrammarChecker, format_name: str
) -> None:
    use = use_of(tools(strict=True), "auto", None)
    grammar = await grammar_of(checker, rules(format_name, use))
    call = WRITTEN[format_name]

    assert accepts(grammar, "")
    assert accepts(grammar, "Hello\n{}")
    assert accepts(grammar, f"Hm. {call}\n{call} So.")
    assert not accepts(grammar, f"Hm. {call.replace('1', 'null')}")
    assert not accepts(grammar, f"Hm. {call.replace('1', 'None')}")
    assert not accepts(grammar, f"Hm. {call[: call.index('1')]}")


async def test_strict_tools_have_no_call_in_another_spelling(checker: GrammarChecker) -> None:
    use = use_of(tools(strict=True), "auto", None)
    grammar = await grammar_of(checker, rules("qwen3_coder", use))

    assert accepts(grammar, f"Hm. <function {WRITTEN['qwen3_coder']} <functio")
    assert not accepts(grammar, "Hm. <function=point>")
    assert not accepts(grammar, f"Hm. <function=point> {WRITTEN['qwen3_coder']}")


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


@pytest.mark.parametrize("format_name", list(WRITTEN))
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


@pytest.mark.parametrize("format_name", sorted(LOOK_LIKE_TEXT))
async def test_answer_is_free_when_strict_calls_look_like_text(
    checker: GrammarChecker, format_name: str
) -> None:
    use = use_of(tools(strict=True), "auto", None)

    plan = await plan_answer(checker.of(""), rules(format_name, use))

    assert plan.grammar is None
    assert plan.ignored == ("tools.0.function.strict", "tools.1.function.strict")
    assert plan.check is not None
    assert plan.check.arguments.keys() == SCHEMAS.keys()


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


@pytest.mark.parametrize("format_name", ["harmony", "command", "gigachat"])
async def test_required_calls_are_json_when_their_notation_is_none_of_json(
    checker: GrammarChecker, format_name: str
) -> None:
    use = use_of(tools(), "required", None)
    plan = await plan_answer(checker.of(""), rules(format_name, use))
    assert plan.grammar is not None
    text = f"[{WRITTEN['json']}]"

    assert accepts(plan.grammar, text)
    assert read(text, plan).calls == [("point", '{"x": 1}')]


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


async def test_required_calls_keep_their_notation_without_special_token(
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
