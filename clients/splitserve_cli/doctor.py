"""`splitserve doctor`: what is wrong here, what that means, and what to do.

What it is asked about first is whether packages are there and fit each other; so whatever needs
them is imported late, and that this fails is a finding like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from splitserve_cli.checks.finding import Finding, State, tell, wrong

_PACKAGES = "pip install --force-reinstall splitserve, into a venv of its own"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        from splitserve_cli.examination import examine
    except Exception as error:  # whatever packages raise that are not there, broken or too old
        return tell(_of_packages(error), is_json="--json" in argv, shows_all="--verbose" in argv)
    return examine(argv)


def _of_packages(error: Exception) -> list[Finding]:
    """Why not even this command can be loaded."""
    text = " ".join(str(error).split())
    meaning = f"no process and no command starts with this Python, {sys.executable}"
    findings = [wrong("imports", f"{type(error).__name__}: {text}", meaning, _PACKAGES)]
    try:
        from splitserve_cli.checks.packages import check_packages, check_python
    except ImportError:
        return findings
    return [
        *findings,
        check_python(),
        *(each for each in check_packages(None) if each.state is State.WRONG),
    ]
