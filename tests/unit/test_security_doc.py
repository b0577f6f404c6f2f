"""docs/security.md names tests and options that there are."""

from __future__ import annotations

import re
from pathlib import Path

from splitserve_options.table import OPTIONS

ROOT = Path(__file__).resolve().parents[2]


def test_security_doc_names_tests_and_options_that_exist() -> None:
    document = (ROOT / "docs" / "security.md").read_text()
    limits = document.partition("## Limits")[2]
    named = set(re.findall(r"`(test_\w+)`", limits))
    options = set(re.findall(r"`(--[a-z-]+)", limits))

    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert named
    assert named - tests == set()
    assert options - {option.flag for option in OPTIONS} == set()
