"""Writes the lists of all options into docs/options.md, docker-compose.yml and .env.example.

`--check` writes nothing, and exits with 1 if one of them is not what it would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "protos"))

from splitserve_options.option import COMMANDS, Kind, Option  # noqa: E402
from splitserve_options.options import options_of  # noqa: E402
