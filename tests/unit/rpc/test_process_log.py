"""Everything that a process writes to standard error is JSON, whoever writes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
BEGIN = """
import logging, os, subprocess, sys, threading, warnings
from splitserve_rpc.process_log import start_logging
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


def test_errors_of_finalizers_are_one_line_each_even_at_the_very_end() -> None:
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


def test_errors_of_a_child_are_its_own_when_it_logs_itself() -> None:
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
