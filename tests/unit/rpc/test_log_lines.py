"""A log line is one line that says what it seems to say, whatever others have put into it."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_rpc.process_log import (
    CONTINUED,
    LOGGING_PACKAGES,
    MAX_LINE_CHARS,
    MAX_TRACEBACK_CHARS,
    MAX_TRACEBACK_LINES,
    LineFormatter,
)
from splitserve_rpc.text import printable

ROOT = Path(__file__).parents[3]
# What a terminal, an editor or a reader of lines may take for something else than a character.
# By Unicode's own categories: controls, formats (directions, no width), surrogates, line ends.
UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
HOSTILE = "x\n2026-01-01 00:00:00,000 INFO a forged\r\x1b[2K\x9b1m\u2028\u202e\u2066\x00\x85\ud800"
texts = st.one_of(
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


@given(texts)
def test_event_is_one_safe_line_when_a_field_is_hostile(text: str) -> None:
    line = record("event field=%s", text)

    assert is_safe(line)
    assert len(line.splitlines()) == 1


@given(texts)
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


def test_traceback_is_bounded_and_has_its_end_when_it_is_long() -> None:
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
from splitserve_rpc.process_log import start_logging
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
