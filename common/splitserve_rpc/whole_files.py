"""Reader of small regular files that does not block."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a regular file. Raises OSError with the reason in `strerror`.

    Refuses other files: a pipe without a writer and a device have no end.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"is too large; allowed: {max_bytes} bytes")
    return content
