"""Command `splitserve doctor`: finds problems, their consequences and remedies.

It first checks that packages are installed and compatible. So modules that need packages are
imported late, and a failed import is a finding like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from splitserve_cli.checks.finding import Finding, State, write_findings, wrong

_PACKAGES = "pip install --force-reinstall splitserve, in a separate venv"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    try:
        from splitserve_cli.examination import examine
    except Exception as error:  # packages that are missing, broken or too old may raise anything
        return write_findings(
            _of_packages(error), is_json="--json" in argv, shows_all="--verbose" in argv
        )
    return examine(argv)


def _of_packages(error: Exception) -> list[Finding]:
    """Returns findings that explain why the command's own modules cannot be imported."""
    text = " ".join(str(error).split())
    meaning = f"no splitserve command starts with this Python: {sys.executable}"
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
