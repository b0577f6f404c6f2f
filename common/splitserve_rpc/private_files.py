"""Files that only their owner may read, and atomic replacement of files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_MODE = 0o600
_PUBLIC_MODE = 0o644
# Maximum mode of a secret: only the owner writes, only the group reads.
_MOST_ALLOWED = 0o640


def open_private(path: str, flags: int) -> int:
    """`opener` of `open` that makes the file private, whatever the umask or the old mode is.

    Other than regular files keep their mode. Raises OSError.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, _MODE)
    try:
        make_private(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def make_private(file: int | str | Path) -> None:
    """Sets mode 0600 on a regular file. Raises OSError."""
    mode = os.stat(file).st_mode
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) != _MODE:
        os.chmod(file, _MODE)


def replace_file(path: Path, content: bytes, *, is_secret: bool = True) -> None:
    """Replaces a file atomically: readers find the old content or the new one.

    A secret becomes readable to nobody new; present readers stay, since an operator may be another
    user than a service. Raises OSError.
    """
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    with os.fdopen(descriptor, "wb") as file:
        before = path.stat() if path.exists() else None
        if before is not None:
            _keep_owner(descriptor, before)
        if not is_secret:
            os.fchmod(descriptor, _PUBLIC_MODE)
        elif before is not None:
            os.fchmod(descriptor, stat.S_IMODE(before.st_mode) & _MOST_ALLOWED | _MODE)
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    fresh.replace(path)


def _keep_owner(descriptor: int, before: os.stat_result) -> None:
    now = os.fstat(descriptor)
    if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
        os.fchown(descriptor, before.st_uid, before.st_gid)
