from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("everything.journal", 0, "identical"),
        ("beam_of_width_1.fixed_at_5.journal", 1, "recorded: nothing\n  replayed: address"),
        ("README.md", 2, "README.md: it does not begin as a journal of this format does"),
    ],
)
def test_splitserve_replay_tells_by_its_exit_code_when_it_has_replayed(
    name: str, code: int, text: str
) -> None:
    command = [sys.executable, "-m", "splitserve_cli", "replay", str(FOLDER / name)]

    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (result.returncode, text in result.stdout + result.stderr) == (code, True)
