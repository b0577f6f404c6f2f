"""A program in a session of its own, by which all that it ever starts can be found."""

from __future__ import annotations

import importlib
import os
import sys


def main() -> int:
    """The first argument is the package that is run; the others are its own."""
    os.setsid()
    package = sys.argv.pop(1)
    code: int = importlib.import_module(f"{package}.__main__").main()
    return code
