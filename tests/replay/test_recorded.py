"""Every journal here is replayed; see README.md in this folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_service.journal import replay
from scheduler_service.journal.__main__ import describe

JOURNALS = sorted(Path(__file__).parent.glob("*.journal"))
_FIXED = re.compile(r"\.fixed_at_(\d+)\.journal$")


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.name)
def test_replay_decides_as_recorded_when_that_was_right(path: Path) -> None:
    report = replay(path)

    fixed = _FIXED.search(path.name)
    if fixed is None:
        assert report.difference is None, describe(path, report)
    else:
        assert report.difference is not None, "decides again as when it was wrong"
        assert report.difference.event == int(fixed[1]), describe(path, report)


def test_journals_are_found() -> None:
    assert len(JOURNALS) >= 2


FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("everything.journal", 0, "identical"),
        ("beam_of_width_1.fixed_at_5.journal", 1, "recorded: nothing\n  replayed: address"),
        ("README.md", 2, "README.md: not a journal of this format"),
    ],
)
def test_replay_command_reports_by_its_exit_code(name: str, code: int, text: str) -> None:
    command = [sys.executable, "-m", "splitserve_cli", "replay", str(FOLDER / name)]

    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (result.returncode, text in result.stdout + result.stderr) == (code, True)
