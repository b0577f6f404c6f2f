"""Log lines: safe, bounded, one per event; in JSON whoever writes them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tomllib
import unicodedata
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_common import (
    CONTINUED,
    LOGGING_PACKAGES,
    MAX_FIELD_CHARS,
    MAX_LINE_CHARS,
    MAX_TRACEBACK_CHARS,
    MAX_TRACEBACK_LINES,
    JsonFormatter,
    LineFormatter,
    LogContext,
    log_context,
    printable,
)
from tests.unit.test_log_events import log_calls

ROOT = Path(__file__).parents[3]
# What a terminal, an editor or a reader of lines may take for something else than a character.
# By Unicode's own categories: controls, formats (directions, no width), surrogates, line ends.
UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
HOSTILE = "x\n2026-01-01 00:00:00,000 INFO a forged\r\x1b[2K\x9b1m\u2028\u202e\u2066\x00\x85\ud800"
hostile_texts = st.one_of(
    st.text(st.characters(codec=None)),
    st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"])),
    st.just(HOSTILE),
)


def record(message: str, *arguments: object, error: BaseException | None = None) -> str:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("a.b", logging.INFO, "f.py", 1, message, arguments, exc_info)
    return LineFormatter().format(made)


def is_safe(line: str) -> bool:
    return not any(unicodedata.category(char) in UNSAFE for char in line)


@given(hostile_texts)
def test_event_is_one_safe_line_when_a_field_is_hostile(text: str) -> None:
    line = record("event field=%s", text)

    assert is_safe(line)
    assert len(line.splitlines()) == 1


@given(hostile_texts)
def test_traceback_cannot_begin_an_event_when_the_error_is_hostile(text: str) -> None:
    error = ValueError(text)
    error.__cause__ = KeyError(text)
    event, *continued = record("event", error=error).split("\n")

    assert event.endswith("INFO a.b event")
    assert continued
    assert all(line.startswith(CONTINUED) and is_safe(line) for line in continued)


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"])))
def test_printable_changes_nothing_when_there_is_nothing_to_hide(text: str) -> None:
    assert printable(text) == text


def test_printable_shows_what_was_there() -> None:
    assert printable("é a\n\x1b\u202e\ud800") == r"é a\n\x1b\u202e\ud800"


def test_line_is_bounded_when_a_field_is_long() -> None:
    line = record("event field=%s", "x" * 10 * MAX_LINE_CHARS)

    assert len(line) <= MAX_LINE_CHARS + len("...")


def test_traceback_is_bounded_and_keeps_its_end() -> None:
    error = ValueError("\n".join(["x" * 10 * MAX_TRACEBACK_CHARS] * 2 * MAX_TRACEBACK_LINES))
    lines = record("event", error=error).split("\n")
    assert len(lines) <= MAX_TRACEBACK_LINES + 2
    assert max(map(len, lines)) <= len(CONTINUED) + MAX_TRACEBACK_CHARS + len("...")

    assert lines[-1].startswith(CONTINUED + "x")


def test_traceback_shows_where_and_what_when_something_was_raised() -> None:
    with pytest.raises(OSError, match="why") as raised:
        raise OSError("why")

    lines = record("event", error=raised.value).split("\n")
    assert lines[-1] == f"{CONTINUED}OSError: why"
    assert any('raise OSError("why")' in line for line in lines)


def test_packages_that_log_are_all_that_there_are() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = settings["tool"]["importlinter"]["root_packages"]

    # What protoc generates logs nothing.
    assert sorted(LOGGING_PACKAGES) == sorted(set(packages) - {"splitserve"})


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["own debug", "own info", "own error", "library warning"]),
        ("info", ["own info", "own error", "library warning"]),
        ("error", ["own error"]),
    ],
)
def test_start_logging_shows_libraries_only_where_they_warn(level: str, shown: list[str]) -> None:
    program = f"""
import logging
from splitserve_common import start_logging
start_logging({level!r})
own, library = logging.getLogger("scheduler_service.x"), logging.getLogger("asyncio")
for each in ("debug", "info", "error"):
    getattr(own, each)("own " + each)
for each in ("debug", "info", "warning"):
    getattr(library, each)("library " + each)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "common",
        capture_output=True,
        text=True,
        check=True,
    )

    assert [line.split(" ", 4)[4] for line in ended.stderr.splitlines()] == shown


hostile_fields = st.one_of(
    st.text(st.characters(codec=None)),
    st.sampled_from(["x\n{}", 'a" , "event": "forged', "b=1 c=2", "%s %d", "\ud800\u2028\x1b[2K"]),
)


def line_of(record: logging.LogRecord) -> str:
    return JsonFormatter().format(record)


def log_record(
    message: str, *arguments: object, logger: str = "scheduler_service.a"
) -> logging.LogRecord:
    return logging.LogRecord(logger, logging.WARNING, "f.py", 1, message, arguments, None)


def logged(message: str, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line_of(log_record(message, *arguments)))
    return found


@given(hostile_fields, hostile_fields)
def test_fields_are_what_was_logged_when_they_are_hostile(first: str, second: str) -> None:
    line = line_of(log_record("event_name a=%s b=%r: because %s", first, second, first))

    assert len(line.splitlines()) == 1
    assert line.isascii()
    shown = json.loads(line)
    assert shown["event"] == "event_name"
    as_sent = [each.encode("utf-8", "backslashreplace").decode() for each in (first, second)]
    assert shown["fields"] == {"a": as_sent[0], "b": as_sent[1]}


def test_numbers_stay_numbers_and_the_rest_is_text() -> None:
    shown = logged(
        "e a=%d b=%g c=%.1f d=%04o f=%.1f..%.1f g=%s h=%s", 1, 0.5, 2.25, 420, 1, 2, None, 3
    )

    assert shown["fields"] == {
        "a": 1, "b": 0.5, "c": 2.25, "d": "0644", "f": "1.0..2.0", "g": None, "h": 3
    }  # fmt: skip
    assert shown["message"] == "e a=1 b=0.5 c=2.2 d=0644 f=1.0..2.0 g=None h=3"


def test_line_parses_everywhere_when_a_number_is_none() -> None:
    assert logged("event rate=%f", float("nan"))["fields"] == {"rate": "nan"}


def test_line_has_time_level_and_logger() -> None:
    before = datetime.now(UTC)
    shown = logged("event")

    assert (shown["level"], shown["logger"]) == ("WARNING", "scheduler_service.a")
    assert shown["time"].endswith("Z")
    assert before <= datetime.fromisoformat(shown["time"]) <= datetime.now(UTC)


def test_event_is_none_when_a_library_speaks() -> None:
    shown = json.loads(line_of(log_record("event a=%s", 1, logger="uvicorn.error")))

    assert "event" not in shown
    assert "fields" not in shown
    assert shown["message"] == "event a=1"


def test_error_has_its_type_and_traceback() -> None:
    with pytest.raises(OSError, match="why") as raised:
        raise OSError("why")
    made = log_record("event")
    made.exc_info = (OSError, raised.value, raised.tb)

    error = json.loads(line_of(made))["error"]
    assert error["type"] == "OSError"
    assert error["traceback"][-1] == "OSError: why"


def test_json_line_is_bounded_when_a_field_is_long() -> None:
    shown = logged("event a=%s", "x" * 100_000)

    assert len(shown["message"]) == MAX_LINE_CHARS + len("...")
    assert len(shown["fields"]["a"]) == MAX_FIELD_CHARS + len("...")


@pytest.mark.parametrize("formatter", [LineFormatter(), JsonFormatter()])
def test_line_names_request_and_trace_when_it_is_about_one(formatter: logging.Formatter) -> None:
    token = log_context.set(LogContext("req_1", "a1" * 16))
    try:
        line = formatter.format(log_record("event"))
    finally:
        log_context.reset(token)

    assert "req_1" in line
    assert "a1" * 16 in line
    assert "req_1" not in formatter.format(log_record("event"))


@pytest.mark.parametrize("text", sorted({each.text for each in log_calls()}))
def test_event_has_its_name_and_all_fields(text: str) -> None:
    # As many arguments as it takes, whatever they are.
    arguments: tuple[object, ...] = ()
    while True:
        try:
            text % arguments
            break
        except TypeError as error:
            kinds = "number" in str(error) or "integer" in str(error)
            arguments = (*arguments[:-1], 1) if kinds else (*arguments, "x")
    shown = logged(text, *arguments)

    assert (
        shown["event"]
        == text.split(" ")[0].rstrip(":") % arguments[: text.split(" ")[0].count("%")]
    )
    assert len(shown.get("fields", {})) == text.count("=%")


def test_json_line_has_fields_beside_a_formatted_message() -> None:
    made = log_record("%s", "registered address=a")
    made.__dict__.update(event="registered", fields={"address": "a", "epoch": 2})

    shown = json.loads(line_of(made))
    assert (shown["event"], shown["fields"]) == ("registered", {"address": "a", "epoch": 2})


BEGIN = """
import logging, os, subprocess, sys, threading, warnings
from splitserve_common import start_logging
errors = start_logging("info", "json")
"""


def run(program: str, return_code: int = 0) -> list[dict[str, Any]]:
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        cwd=ROOT / "common",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == return_code, ended.stderr
    return [json.loads(line) for line in ended.stderr.splitlines()]


def test_native_code_and_children_are_lines_of_the_log() -> None:
    lines = run('os.write(2, b"native \\xff\\n"); subprocess.run(["sh", "-c", "echo child >&2"])')

    assert [(line["logger"], line["message"]) for line in lines] == [
        ("stderr", "native \\xff"),
        ("stderr", "child"),
    ]


def test_last_words_are_there_when_the_process_ends_at_once() -> None:
    (line,) = run('sys.stderr.write("cannot listen\\n"); sys.exit(2)', return_code=2)

    assert line["message"] == "cannot listen"


def test_uncaught_errors_are_one_line_each_with_their_traceback() -> None:
    program = """
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("end")
"""
    lines = run(program, return_code=1)

    assert [line["event"] for line in lines] == ["uncaught_exception"] * 2
    assert [line["error"]["type"] for line in lines] == ["ZeroDivisionError", "ValueError"]


def test_finalizer_errors_are_one_line_each() -> None:
    program = """
class Fragile:
    def __del__(self):
        1 / 0

Fragile()
kept = Fragile()
kept.itself = kept
"""
    lines = run(program)

    assert [line["event"] for line in lines] == ["ignored_exception"] * 2
    assert {line["error"]["type"] for line in lines} == {"ZeroDivisionError"}


def test_warnings_are_lines_of_the_log() -> None:
    (line,) = run('warnings.warn("careful")')

    assert (line["logger"], line["level"]) == ("py.warnings", "WARNING")
    assert "careful" in line["message"]


def test_child_that_logs_itself_keeps_its_lines() -> None:
    (line,) = run("""
child = "import sys; sys.stderr.write('{}')"
subprocess.run([sys.executable, "-c", child], stderr=errors.file.fileno())
""")

    assert line == {}


def test_nothing_is_lost_and_nobody_waits_when_there_is_much() -> None:
    lines = run("""
for number in range(2000):
    os.write(2, b"line %d of many that fill what a pipe holds\\n" % number)
""")

    assert [line["message"].split()[1] for line in lines] == list(map(str, range(2000)))


def test_what_follows_in_the_same_process_has_standard_error_back() -> None:
    program = """
errors.close()
os.execv(sys.executable, [sys.executable, "-c", "import os; os.write(2, b'{}')"])
"""

    assert run(program) == [{}]
