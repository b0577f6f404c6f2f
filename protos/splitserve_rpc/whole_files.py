"""Files that are read whole while others wait for that: so regular ones, which are not large."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_whole(path: Path, max_bytes: int) -> bytes:
    """The content. Raises OSError, whose `strerror` says what is wrong.

    A pipe that nobody writes to would never be read to its end, and a device has none.
    """
    # Whoever opens a pipe otherwise waits for somebody to write to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"is too large; allowed: {max_bytes} bytes")
    return content
