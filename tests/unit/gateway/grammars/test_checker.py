"""Verdicts on grammars, and their limits of time, memory and queue."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from splitserve_gateway.grammars import (
    CheckerLimits,
    Gbnf,
    GrammarChecker,
    GrammarCheckUnavailable,
    GrammarRefused,
    Source,
    check_process,
)
from splitserve_grammars import MAX_GRAMMAR_BYTES, NUM_TRIES
from splitserve_text import Choices, Grammar, JsonSchema, Lark, Regex
from tests.support.grammars.sampled_texts import failing_first
from tests.support.processes.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A lexer of a million states: seconds.
SLOW = JsonSchema('{"type": "integer", "multipleOf": 1000003}')


def doubling(num_levels: int, first: str) -> Lark:
    rules = (f"{first}{i}: {first}{i + 1} {first}{i + 1}" for i in range(num_levels))
    return Lark("\n".join([f"start: {first}0", *rules, f'{first}{num_levels}: "x"']))


def schema(value: object) -> JsonSchema:
    return JsonSchema(json.dumps(value))


GOOD: list[Source] = [
    JsonSchema("true"),
    schema({"type": "object"}),
    schema({"$defs": {"n": {"properties": {"c": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}),
    schema({"type": "string", "pattern": "(a{1000}){1000}"}),
    schema({"type": "array", "minItems": 10**9, "items": {"maxLength": 10**9, "type": "string"}}),
    schema({"enum": [f"value {index}" for index in range(3500)]}),
    schema({"$defs": {
        **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)},
        "d30": {"type": "object"},
    }, "$ref": "#/$defs/d0"}),
    Regex("(a{1000}){1000}"),
    Regex("(a|b)*a(a|b){200}"),
    Lark("start: start start | \"a\" | "),
    Lark('start: ("a"{1000}){1000}'),
    doubling(40, "a"),
    Choices(("a", "b")),
]  # fmt: skip
BAD: list[tuple[Source, str]] = [
    (JsonSchema("{nope"), "not valid JSON"),
    (JsonSchema("false"), "Unsatisfiable"),
    (JsonSchema('{"items":' * 5000 + "{}" + "}" * 5000), "deeply"),
    (JsonSchema("[" * 60_000), "deeply"),
    (JsonSchema("[]"), "object"),
    (schema({"x-guidance": {"lenient": True}, "not": {}}), "x-guidance"),
    (schema({"type": "foo"}), "foo"),
    (schema({"$ref": "#"}), "no text matches it"),
    (schema({"type": "object", "properties": {f"p{i}": {} for i in range(600)}}), "too many ways"),
    (schema({"not": {"type": "string"}}), "not"),
    (schema({"type": "string", "format": "no-such-format"}), "no-such-format"),
    (schema({"$ref": "http://localhost:1/schema"}), "localhost"),
    (schema({"$ref": "file:///etc/passwd"}), "etc/passwd"),
    (schema({"allOf": [
        {"anyOf": [{"required": [f"p{i}{j}"], "properties": {f"p{i}{j}": {"minLength": j}}}
                   for j in range(10)]} for i in range(20)
    ]}), "too large"),
    (Regex("(" * 5000 + "a" + ")" * 5000), ""),
    (Regex("(a"), ""),
    (Regex("a(?=b)"), ""),
    (Regex(".*" * 1000), "expressions"),
    (Lark("start: start"), "no text matches it"),
    (Lark("start: nobody"), "nobody"),
    (Lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "deeply"),
    (Lark("%import common.NO_SUCH_THING\nstart: NO_SUCH_THING"), ""),
    (Gbnf("root ::= nobody"), "nobody"),
    (Gbnf("::="), ""),
    (Gbnf("root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "recursion"),
    (Gbnf("root ::= [a"), ""),
]  # fmt: skip


@pytest.mark.parametrize("source", GOOD)
async def test_grammar_is_taken_when_it_compiles(checker: GrammarChecker, source: Grammar) -> None:
    assert await checker.check("field", source) == source


@pytest.mark.parametrize(("source", "why"), BAD)
async def test_grammar_is_refused_with_what_the_compiler_says(
    checker: GrammarChecker, source: Source, why: str
) -> None:
    with pytest.raises(GrammarRefused) as refused:
        await checker.check("guided", source)
    assert refused.value.field == "guided"
    assert why in refused.value.message
    assert 0 < len(refused.value.message) < 600


async def test_gbnf_becomes_lark(checker: GrammarChecker) -> None:
    grammar = await checker.check("field", Gbnf('root ::= "a" | "b"'))

    assert isinstance(grammar, Lark)
    assert await checker.check("field", grammar) == grammar


@pytest.mark.parametrize(
    "source", [Regex(""), Regex("x" * (MAX_GRAMMAR_BYTES + 1)), Lark("\ud800")]
)
async def test_grammar_is_refused_by_its_size_before_it_is_compiled(
    checker: GrammarChecker, source: Grammar
) -> None:
    with pytest.raises(GrammarRefused):
        await checker.check("field", source)


async def test_grammar_is_refused_at_once_when_it_was_too_slow() -> None:
    before = children()
    checker = GrammarChecker(CheckerLimits(first_cpu_s=0.1, max_cpu_s=0.1))
    with pytest.raises(GrammarRefused, match="too much processor time"):
        await checker.check("slow", SLOW)
    await checker.check("quick", Regex("after"))

    processes = children() - before
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(GrammarRefused, match="too much processor time"):
            await asyncio.wait_for(checker.check("slow", SLOW), PATIENCE_S)
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)
    await checker.close()


async def test_grammar_is_taken_when_second_try_has_time() -> None:
    checker = GrammarChecker(CheckerLimits(first_cpu_s=0.001, max_cpu_s=60))
    source = schema({"enum": [f"value {index}" for index in range(3000)]})
    assert await checker.check("field", source) == source
    await checker.close()


async def test_grammar_is_refused_when_it_takes_too_much_memory() -> None:
    limits = CheckerLimits(max_address_bytes=330 << 20, first_cpu_s=60, max_cpu_s=60)
    checker = GrammarChecker(limits)
    with pytest.raises(GrammarRefused, match="too much memory"):
        await checker.check("field", doubling(40, "A"))
    await checker.check("field", Regex("a"))
    await checker.close()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def checking() -> set[asyncio.Task[object]]:
    return {task for task in asyncio.all_tasks() if "FairTrials" in repr(task.get_coro())}


@pytest_asyncio.fixture(loop_scope="module")
async def counted() -> AsyncIterator[GrammarChecker]:
    before, tasks = children(), checking()
    made = GrammarChecker(CheckerLimits(max_waiting=8, max_cached=2))
    yield made
    await made.close()
    assert children() == before
    assert checking() == tasks


async def test_nothing_is_left_when_askers_go_away(counted: GrammarChecker) -> None:
    askers = [asyncio.create_task(counted.check("field", SLOW)) for _ in range(20)]
    await counted.check("field", Choices(("a",)))
    for asker in askers:
        asker.cancel()
    results = await asyncio.gather(*askers, return_exceptions=True)

    assert all(isinstance(result, asyncio.CancelledError) for result in results)


async def test_too_many_waiting_grammars_of_one_tenant_are_turned_away(
    counted: GrammarChecker,
) -> None:
    """A quarter of all, so two."""
    sources = [Regex(f"a{index}") for index in range(5)]
    checks = [counted.check("field", source) for source in sources]
    other = counted.of("other").check("field", Regex("b"))
    *results, of_other = await asyncio.gather(*checks, other, return_exceptions=True)

    assert results[:2] == sources[:2]
    assert [type(result) for result in results[2:]] == [GrammarCheckUnavailable] * 3
    assert of_other == Regex("b")
    assert await counted.check("field", sources[4]) == sources[4]


async def test_too_many_waiting_grammars_are_turned_away(counted: GrammarChecker) -> None:
    sources = [Regex(f"a{index}") for index in range(10)]
    checks = [counted.of(s.pattern).check("field", s) for s in sources]
    results = await asyncio.gather(*checks, return_exceptions=True)

    assert results[:8] == sources[:8]
    assert [type(result) for result in results[8:]] == [GrammarCheckUnavailable] * 2


async def test_nothing_is_known_of_a_grammar_when_no_process_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = failing_first(tmp_path, NUM_TRIES)
    monkeypatch.setattr(check_process, "trial_command", lambda *_, **__: command)
    checker = GrammarChecker(CheckerLimits(max_cpu_s=60))
    with pytest.raises(GrammarCheckUnavailable):
        await checker.check("field", Regex("b"))

    assert await checker.check("field", Regex("b")) == Regex("b")
    await checker.close()


async def test_waiting_grammars_are_turned_away_when_it_closes() -> None:
    checker = GrammarChecker(CheckerLimits(max_cpu_s=60))
    slow = asyncio.create_task(checker.check("field", SLOW))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(checker.check("field", Regex("a")))
    await asyncio.sleep(0)
    await checker.close()

    results = await asyncio.gather(slow, waiting, return_exceptions=True)
    assert [type(result) for result in results] == [GrammarCheckUnavailable] * 2


async def test_answer_is_not_checked_for_long_when_a_pattern_backtracks(
    checker: GrammarChecker,
) -> None:
    """A regular expression of the caller may take hours."""
    limits = CheckerLimits(first_cpu_s=0.1, max_cpu_s=0.1)
    impatient = GrammarChecker(limits)
    texts = ["", '{"pattern": "^(a+)+$"}', f'"{"a" * 50}b"']
    found = await impatient.problem(texts)
    await impatient.close()

    assert found == "not checked: it takes too much processor time"
    assert await checker.problem(["", '{"pattern": "^a+$"}', '"ab"']) is not None
    assert await checker.problem(["", '{"pattern": "^a+$"}', '"a"']) is None


async def test_answer_is_not_checked_when_no_process_answers() -> None:
    closed = GrammarChecker()
    await closed.close()
    found = await closed.problem(["", "{}", "1"])

    assert found == "not checked: the grammar checker is closed"
