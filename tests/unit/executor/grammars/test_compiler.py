from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from executor_service.grammars import compiler as compiler_module
from executor_service.grammars.compiler import Compiled, GrammarCompiler
from executor_service.grammars.grammar_text import grammar_text
from executor_service.grammars.trial import CompileTrial
from executor_service.steps.sampling_params import Grammar
from tests.support.grammars.sampled_texts import byte_level_texts, json_schema

TIMEOUT_S = 60.0


class CountingTrial(CompileTrial):
    """Tries nothing. Each trial waits until the test lets it."""

    def __init__(self, tried: list[str], gate: threading.Semaphore) -> None:
        super().__init__()
        self._tried = tried
        self._gate = gate

    def find_error(self, grammar: str) -> str:
        self._gate.acquire()
        self._tried.append(grammar)
        return ""


@contextmanager
def counting_compiler(
    num_open: int = 10_000,
) -> Iterator[tuple[GrammarCompiler, list[str], threading.Semaphore]]:
    tried: list[str] = []
    gate = threading.Semaphore(num_open)
    compiler = GrammarCompiler(byte_level_texts().vocabulary, lambda: CountingTrial(tried, gate))
    try:
        yield compiler, tried, gate
    finally:
        gate.release(10_000)
        compiler.close()


def regex(number: int) -> Grammar:
    return Grammar("regex", (f"a{{{number}}}",))


def compiled(compiler: GrammarCompiler, grammar: Grammar) -> Compiled:
    wanted = compiler.compile(grammar)
    assert wanted is not None
    return wanted.result(TIMEOUT_S)


def test_grammar_is_compiled_once_when_many_want_it() -> None:
    with counting_compiler() as (compiler, tried, _):
        wanted = [compiler.compile(Grammar("regex", ("ab+",))) for _ in range(20)]
        matchers = {id(one.result(TIMEOUT_S).matcher) for one in wanted if one is not None}
        assert compiled(compiler, Grammar("regex", ("ab+",))).matcher is not None
        assert (len(wanted), len(matchers), len(tried)) == (20, 1, 1)


def test_grammar_is_compiled_again_when_it_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_REMEMBERED", 2)
    with counting_compiler() as (compiler, tried, _):
        for number in (1, 2, 1, 3, 1, 2):  # 3 takes the place of 2
            compiled(compiler, regex(number))
        assert tried == [grammar_text(regex(number)) for number in (1, 2, 3, 2)]


def test_texts_are_forgotten_when_they_are_too_long_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_REMEMBERED_BYTES", 100)
    long = [Grammar("regex", (letter * 60,)) for letter in "ab"]
    with counting_compiler() as (compiler, tried, _):
        for grammar in (*long, long[0]):
            compiled(compiler, grammar)
        assert len(tried) == 3


def test_grammar_is_not_compiled_when_nobody_waits_for_it_any_more() -> None:
    with counting_compiler(num_open=0) as (compiler, tried, gate):
        held = [compiler.compile(regex(number)) for number in (1, 2)]  # one for each thread
        left = compiler.compile(regex(3))
        assert left is not None
        gone = weakref.ref(left)
        last = compiler.compile(regex(4))
        del left
        gc.collect()
        assert gone() is None
        gate.release(4)
        for wanted in (*held, last):
            assert wanted is not None
            wanted.result(TIMEOUT_S)
        assert sorted(tried) == sorted(grammar_text(regex(number)) for number in (1, 2, 4))


def test_grammar_is_not_taken_when_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_WAITING", 3)
    with counting_compiler(num_open=0) as (compiler, _, _gate):
        wanted = [compiler.compile(regex(number)) for number in range(1, 8)]
        assert wanted[:3] == [one for one in wanted[:3] if one is not None]
        assert wanted[-1] is None


def test_error_is_short_and_remembered_when_a_grammar_is_invalid() -> None:
    with counting_compiler() as (compiler, tried, _):
        grammar = Grammar("lark", ("start: (" + "x" * 5000,))
        first = compiled(compiler, grammar)
        assert first.matcher is None
        assert 0 < len(first.error) < 600
        assert compiled(compiler, grammar) is first
        assert len(tried) == 1


def test_others_are_compiled_when_one_breaks_its_trial() -> None:
    """What takes too long, and what follows its rules too deep for any stack but a large one."""
    chain = "".join(f"A{index}: A{index + 1} /x/\n" for index in range(4000))
    deep = Grammar("lark", (f"start: A0\n{chain}A4000: /a/\n",))
    endless = json_schema({"type": "integer", "multipleOf": 9999991})
    compiler = GrammarCompiler(byte_level_texts().vocabulary, lambda: CompileTrial(max_cpu_s=0))
    try:
        wanted = [compiler.compile(g) for g in (endless, deep, *map(regex, range(1, 6)))]
        results = [one.result(TIMEOUT_S) for one in wanted if one is not None]
        assert "to compile" in results[0].error
        assert [result.error for result in results[1:]] == [""] * 6
    finally:
        compiler.close()


def test_error_says_so_when_the_trial_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_service.grammars.trial.STACK_BYTES", 256 * 1024)
    chain = "".join(f"a{index}: a{index + 1} /x/\n" for index in range(4000))
    trial = CompileTrial()
    try:
        assert "memory" in trial.find_error(
            grammar_text(Grammar("lark", (f"start: a0\n{chain}a4000: /a/",)))
        )
        assert trial.find_error(grammar_text(Grammar("regex", ("a",)))) == ""
    finally:
        trial.close()


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (Grammar("json_schema", ("{",)), "no JSON"),
        (Grammar("json_schema", ("[" * 30_000,)), "no JSON"),
        (Grammar("json_schema", ("[]",)), "object"),
        (Grammar("json_schema", ('{"maximum": NaN}',)), "expected value"),
        (Grammar("regex", ("(",)), "unclosed"),
        (Grammar("lark", ("start: a",)), "a"),
        (Grammar("lark", ('start: "a" <|end|>',)), "<|end|>"),
        (Grammar("lark", ('{"grammars": []}',)), "expecting rule"),
    ],
)
def test_grammar_is_refused_by_name_when_it_is_wrong(grammar: Grammar, word: str) -> None:
    compiler = GrammarCompiler(byte_level_texts().vocabulary)
    try:
        assert word in compiled(compiler, grammar).error
    finally:
        compiler.close()
