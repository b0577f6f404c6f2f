"""Every journal here is replayed; see README.md in this folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scheduler_service.journal.__main__ import describe
from scheduler_service.journal.replay import replay

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
