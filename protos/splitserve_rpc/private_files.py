"""Files that only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_MODE = 0o600


def open_private(path: str, flags: int) -> int:
    """An `opener` of `open`: whatever the umask is, and whatever the file was, it is private now.

    What is no regular file keeps its mode. Raises OSError.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, _MODE)
    try:
        make_private(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def make_private(file: int | str | Path) -> None:
    """Lets the owner read and write it, and nobody else. Raises OSError."""
    mode = os.stat(file).st_mode
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) != _MODE:
        os.chmod(file, _MODE)
