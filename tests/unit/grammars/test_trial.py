"""What is said of grammars, and that whoever asks a process about one goes on."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import llguidance
import pytest

from splitserve_grammars import (
    MAX_COMPILED_BYTES,
    MAX_LINE_BYTES,
    GrammarTrialResult,
    GrammarTrials,
    TrialTooSlow,
    TrialUnavailable,
    decode_answer,
    encode_end,
    encode_task,
    encode_verdict,
    error_message,
    trial_command,
    trial_process,
)
from splitserve_grammars.trial_process import try_grammar
from tests.support.grammars.json_schemas import REFUSED, SUPPORTED
from tests.support.processes.patience import PATIENCE_S

TOKENIZER = llguidance.LLTokenizer("byte")
BAD = [
    *(("json_schema", json.dumps(schema)) for schema, _ in REFUSED),
    ("json_schema", '{"$ref": "#"}'),
    ("json_schema", '{"properties": {' + ",".join(f'"p{i}": {{}}' for i in range(600)) + "}}"),
    ("regex", "("),
    ("regex", "(" * 3000),
    ("regex", ".*" * 1000),
    ("regex", "a(?=b)"),
    ("lark", ""),
    ("lark", "start: nobody"),
    ("lark", "start: start"),
    ("lark", "start: @top"),
    ("lark", "start: <[99999999]>"),
    ("lark", 'start: "\\ud800"'),
    ("lark", "start: %json {"),
    ("lark", "start: " + " ".join(["/x*/"] * 3000)),
    ("gbnf", "root ::= nobody"),
    ("gbnf", "::="),
]
INNER_LIFE = (
    "panic",
    "backtrace",
    "non-verbose",
    "NoExtension",
    "rust",
    ".rs:",
    "unwrap",
    "lexeme",
    "registry",
    "coerce_one_of",
    "start: /",
    "limit 2000",
)


@pytest.mark.parametrize(("kind", "text"), BAD)
def test_error_is_short_and_not_about_the_compiler(kind: str, text: str) -> None:
    error = try_grammar(TOKENIZER, kind, [text]).error
    assert 0 < len(error) < 600
    assert [part for part in INNER_LIFE if part in error] == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("", ""),
        (
            "panic: index out of bounds\n<backtrace>\n 1: core::panicking",
            "it could not be compiled",
        ),
        ("NoExtensionBias\n<non-verbose/>", "no text matches it"),
        ('unknown name: "panic"', 'unknown name: "panic"'),
        (
            "lexer error: too many states: 5 >= 5",
            "its terminals have too many states or expressions",
        ),
        ("x" * 1000, "x" * 500 + "..."),
    ],
)
def test_error_says_what_the_compiler_means(error: str, expected: str) -> None:
    assert error_message(error) == expected


def test_error_has_the_reason_when_a_regex_is_long() -> None:
    error = try_grammar(TOKENIZER, "regex", ["(" * 1000]).error
    assert error.startswith("regex parse error: ")
    assert error_message(
        "regex parse error:\n    (\n    ^\nerror: unclosed group\n 1 | x"
    ).endswith("unclosed group")


@pytest.fixture
def _no_garbage() -> Iterator[None]:
    """Garbage of other tests is not collected while the heap is measured."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage")
def test_grammar_is_refused_when_it_is_too_large_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    large = (
        "start: a0\n" + "".join(f'a{i}: "x" a{i + 1} | "y"\n' for i in range(2000)) + 'a2000: "z"'
    )
    num_bytes = try_grammar(TOKENIZER, "lark", [large]).num_bytes
    small = try_grammar(TOKENIZER, "lark", ['start: "z"']).num_bytes
    assert 10_000 < small < 200_000 < 1_000_000 < num_bytes < MAX_COMPILED_BYTES
    monkeypatch.setattr(trial_process, "MAX_COMPILED_BYTES", 1_000_000)
    assert "too much memory" in try_grammar(TOKENIZER, "lark", [large]).error


@pytest.mark.usefixtures("_no_garbage")
def test_usual_schemas_take_little_when_they_are_compiled() -> None:
    verdicts = [try_grammar(TOKENIZER, "json_schema", [json.dumps(schema)]) for schema in SUPPORTED]
    assert {verdict.error for verdict in verdicts} == {""}
    assert max(verdict.num_bytes for verdict in verdicts) < 1_000_000


def test_verdict_is_read_as_it_was_written() -> None:
    verdict = GrammarTrialResult("no", "start: \u2028\n", 5)
    line = encode_verdict(verdict)
    assert decode_answer(line) == verdict
    assert line.count(b"\n") == 1
    for cut in (line[:-1], b""):
        with pytest.raises(TrialUnavailable):
            decode_answer(cut)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_grammar_is_to_blame_when_its_process_is_out_of_memory(number: signal.Signals) -> None:
    assert "memory" in decode_answer(encode_end(-number)).error


def test_grammar_is_not_blamed_for_a_killed_process() -> None:
    for exit_code in (-signal.SIGKILL, -signal.SIGTERM, 0, 1):
        with pytest.raises(TrialUnavailable):
            decode_answer(encode_end(exit_code))
    with pytest.raises(TrialTooSlow):
        decode_answer(encode_end(-signal.SIGPROF))


def test_process_lives_on_when_a_grammar_ends_its_own() -> None:
    """Too slow, then too deep for its stack, then right."""
    slow = ("json_schema", ['{"type": "integer", "multipleOf": 1000003}'])
    chain = "".join(f"a{index}: a{index + 1} /x/\n" for index in range(4000))
    deep = ("lark", [f"start: a0\n{chain}a4000: /a/"])
    right = ("regex", ["a"])
    command = trial_command(stack_bytes=256 * 1024)
    tasks = b"".join(encode_task(*source, 0.2) for source in (slow, deep, right))
    finished = subprocess.run(command, input=tasks, capture_output=True, check=True)
    first, second, third = finished.stdout.splitlines(keepends=True)
    with pytest.raises(TrialTooSlow):
        decode_answer(first)
    assert "memory" in decode_answer(second).error
    assert decode_answer(third).error == ""


# More than a pipe holds.
LARGE = "x" * 1_000_000


@pytest.mark.parametrize(
    "script",
    [
        "exec sleep 100000",  # it reads nothing
        "exec cat > /dev/null",  # it says nothing
        "printf [; exec cat > /dev/null",  # it does not end what it says
    ],
)
def test_process_is_given_up_when_it_stalls(script: str) -> None:
    trials = GrammarTrials(["sh", "-c", script], max_wall_s=0.3)
    raised: list[Exception] = []

    def ask() -> None:
        try:
            trials.ask("regex", [LARGE], 1.0)
        except TrialUnavailable as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(PATIENCE_S)
    is_stuck = asking.is_alive()
    trials.close()
    asking.join()
    assert not is_stuck
    assert len(raised) == 1


def test_process_is_given_up_when_it_says_too_much() -> None:
    script = f"print('[\"\", \"\", 1' + ' ' * {MAX_LINE_BYTES} + ']', flush=True); input()"
    trials = GrammarTrials([sys.executable, "-c", script], PATIENCE_S)
    with closing(trials), pytest.raises(TrialUnavailable):
        trials.ask("regex", ["a"], 1.0)
