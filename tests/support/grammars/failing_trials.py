"""Processes that try grammars, and end before they have tried any."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from splitserve_grammars.trial import trial_command


def failing_first(folder: Path, num_failures: int) -> Sequence[str]:
    """A command that ends by itself the first times, before it reads anything."""
    count = str(folder / "count")
    code = (
        "import os, sys\n"
        f"open({count!r}, 'a').write('x')\n"
        f"if os.path.getsize({count!r}) <= {num_failures}: sys.exit(1)\n"
        f"os.execv({sys.executable!r}, {trial_command()!r})\n"
    )
    return [sys.executable, "-c", code]
