from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from executor_service.grammars import Compiled, GrammarCompiler
from executor_service.grammars import compiler as compiler_module
from executor_service.grammars import compiler as remembered
from executor_service.steps import Grammar
from splitserve_grammars import (
    MAX_COMPILE_CPU_S,
    MAX_LEXER_BYTES,
    GrammarTrialResult,
    GrammarTrials,
    TrialTooSlow,
    TrialUnavailable,
    trial_command,
)
from tests.support.grammars.sampled_texts import byte_level_texts, failing_first, json_schema

TIMEOUT_S = 240.0
NUM_BYTES = 1000


class HeldTrials:
    """Each waits until the test lets it; what is `slow` takes too long in a first one."""

    def __init__(self, num_open: int) -> None:
        self.tried: list[Grammar] = []
        self.has_begun = threading.Event()
        self.gate = threading.Semaphore(num_open)
        self.slow: set[Grammar] = set()
        self.slow_gate = threading.Event()
        self.slow_gate.set()

    def ask(self, grammar: Grammar, max_cpu_s: float) -> GrammarTrialResult:
        is_first = max_cpu_s < MAX_COMPILE_CPU_S
        self.has_begun.set()
        if is_first:
            self.gate.acquire()
        else:
            self.slow_gate.wait()
        self.tried.append(grammar)
        if is_first and grammar in self.slow:
            raise TrialTooSlow("too slow")
        return GrammarTrialResult(num_bytes=NUM_BYTES)


class HeldTrial(GrammarTrials):
    def __init__(self, trials: HeldTrials) -> None:
        super().__init__()
        self._held = trials

    def ask(self, kind: str, texts: Sequence[str], max_cpu_s: float) -> GrammarTrialResult:
        return self._held.ask(Grammar(kind, tuple(texts)), max_cpu_s)


@contextmanager
def held_compiler(num_open: int = 10_000) -> Iterator[tuple[GrammarCompiler, HeldTrials]]:
    trials = HeldTrials(num_open)
    compiler = GrammarCompiler(byte_level_texts().vocabulary, lambda: HeldTrial(trials))
    try:
        yield compiler, trials
    finally:
        trials.gate.release(10_000)
        trials.slow_gate.set()
        compiler.close()


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    # However busy the machine is.
    made = GrammarCompiler(byte_level_texts().vocabulary, lambda: GrammarTrials(max_wall_s=240))
    yield made
    made.close()


def regex(number: int) -> Grammar:
    return Grammar("regex", (f"a{{{number}}}",))


def wanted(compiler: GrammarCompiler, grammar: Grammar) -> Future[Compiled]:
    future = compiler.compile(grammar)
    assert future is not None
    return future


def compiled(compiler: GrammarCompiler, grammar: Grammar) -> Compiled:
    return wanted(compiler, grammar).result(TIMEOUT_S)


def test_grammar_is_compiled_once_when_many_want_it() -> None:
    with held_compiler() as (compiler, trials):
        futures = [wanted(compiler, Grammar("regex", ("ab+",))) for _ in range(20)]
        matchers = {id(future.result(TIMEOUT_S).matcher) for future in futures}
        assert compiled(compiler, Grammar("regex", ("ab+",))).matcher is not None
        assert (len(matchers), len(trials.tried)) == (1, 1)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("_MAX_REMEMBERED", 2),
        ("_MAX_BYTES", 2 * (NUM_BYTES + MAX_LEXER_BYTES + 10)),
    ],
)
def test_grammar_is_compiled_again_when_it_was_forgotten(
    name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, name, limit)
    with held_compiler() as (compiler, trials):
        for number in (1, 2, 1, 3, 1, 2):  # 3 takes the place of 2
            compiled(compiler, regex(number))
        assert trials.tried == [regex(number) for number in (1, 2, 3, 2)]


def test_texts_are_forgotten_when_they_are_too_long_together(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "_MAX_BYTES", 100)
    invalid = [Grammar("regex", ("(" * 60 + letter,)) for letter in "ab"]
    first = compiled(compiler, invalid[0])
    assert compiled(compiler, invalid[0]) is first
    compiled(compiler, invalid[1])
    assert compiled(compiler, invalid[0]) is not first


def test_grammar_is_compiled_again_when_somebody_asks_for_it() -> None:
    with held_compiler() as (compiler, trials):
        first = compiled(compiler, regex(1))
        compiler.forget(regex(1), first)
        second = compiled(compiler, regex(1))
        compiler.forget(regex(1), first)
        assert compiled(compiler, regex(1)) is second is not first
        assert len(trials.tried) == 2


def test_grammar_is_not_compiled_when_nobody_waits_for_it_any_more() -> None:
    with held_compiler(num_open=0) as (compiler, trials):
        held = wanted(compiler, regex(1))
        left = [wanted(compiler, regex(2))]
        last = wanted(compiler, regex(3))
        left.clear()
        gc.collect()
        trials.gate.release(2)
        for future in (held, last):
            future.result(TIMEOUT_S)
        assert trials.tried == [regex(1), regex(3)]


def test_grammar_is_taken_when_waiting_ones_were_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_WAITING", 3)
    with held_compiler(num_open=0) as (compiler, trials):
        futures = [compiler.compile(regex(1))]
        # From then on it does not wait.
        assert trials.has_begun.wait(TIMEOUT_S)
        futures += [compiler.compile(regex(number)) for number in range(2, 6)]
        assert [future is None for future in futures] == [False] * 4 + [True]
        futures.clear()
        gc.collect()
        assert compiler.compile(regex(9)) is not None


def test_quick_grammars_do_not_wait_for_a_slow_one() -> None:
    with held_compiler() as (compiler, trials):
        trials.slow_gate.clear()
        trials.slow = {regex(1), regex(2)}
        slow = [wanted(compiler, regex(number)) for number in (1, 2)]
        assert compiled(compiler, regex(3)).matcher is not None
        assert not any(future.done() for future in slow)
        trials.slow_gate.set()
        assert [future.result(TIMEOUT_S).error for future in slow] == ["", ""]
        assert trials.tried == [regex(number) for number in (1, 2, 3, 1, 2)]


def test_error_is_short_and_remembered_when_a_grammar_is_invalid(
    compiler: GrammarCompiler,
) -> None:
    grammar = Grammar("lark", ("start: (" + "x" * 5000,))
    first = compiled(compiler, grammar)
    assert first.matcher is None
    assert 0 < len(first.error) < 600
    assert compiled(compiler, grammar) is first


def test_others_are_compiled_when_one_breaks_its_trial(compiler: GrammarCompiler) -> None:
    """What takes too long, and what follows its rules too deep for any stack but a large one."""
    chain = "".join(f"A{index}: A{index + 1} /x/\n" for index in range(4000))
    deep = Grammar("lark", (f"start: A0\n{chain}A4000: /a/\n",))
    endless = json_schema({"type": "integer", "multipleOf": 9999991})
    futures = [wanted(compiler, g) for g in (endless, deep, *map(regex, range(1, 6)))]
    results = [future.result(TIMEOUT_S) for future in futures]
    assert "too much processor time" in results[0].error
    assert [result.error for result in results[1:]] == [""] * 6


def test_error_says_so_when_the_trial_ends_by_itself() -> None:
    chain = "".join(f"a{index}: a{index + 1} /x/\n" for index in range(4000))
    trial = GrammarTrials(trial_command(stack_bytes=256 * 1024))
    try:
        deep = Grammar("lark", (f"start: a0\n{chain}a4000: /a/",))
        assert "memory" in trial.ask(deep.kind, deep.texts, 60.0).error
        assert trial.ask("regex", ("a",), 60.0).error == ""
    finally:
        trial.close()


def test_grammar_is_tried_again_when_its_trial_did_not_start(tmp_path: Path) -> None:
    trial = GrammarTrials(failing_first(tmp_path, 1))
    try:
        assert trial.ask("regex", ("a{1}",), 60.0).error == ""
    finally:
        trial.close()


def test_nothing_is_remembered_of_a_grammar_when_no_trial_starts(tmp_path: Path) -> None:
    command = failing_first(tmp_path, 4)
    with pytest.raises(TrialUnavailable):
        GrammarTrials(command).ask("regex", ("a{1}",), 60.0)
    compiler = GrammarCompiler(byte_level_texts().vocabulary, lambda: GrammarTrials(command))
    try:
        assert compiled(compiler, regex(1)).error == "the executor could not compile the grammar"
        gc.collect()
        assert compiled(compiler, regex(1)).error == ""
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (Grammar("json_schema", ("{",)), "not valid JSON"),
        (Grammar("json_schema", ("[]",)), "object"),
        (Grammar("regex", ("(",)), "unclosed"),
        (Grammar("lark", ("start: a",)), "a"),
        (Grammar("lark", ('start: "a" <|end|>',)), "<|end|>"),
        (Grammar("lark", ('{"grammars": []}',)), "expecting rule"),
    ],
)
def test_grammar_is_refused_by_name_when_it_is_wrong(
    grammar: Grammar, word: str, compiler: GrammarCompiler
) -> None:
    assert word in compiled(compiler, grammar).error
