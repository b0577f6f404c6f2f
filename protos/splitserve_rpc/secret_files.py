"""Files with secrets that others on this machine can read."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

_OTHERS = 0o077
_GROUP_READS = 0o040
_ROOT = 0

_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=256)
def warn_if_readable(path: Path) -> None:
    """Once for a file; one that cannot be looked at is left to whoever reads it."""
    try:
        status = path.stat()
    except OSError:
        return
    if is_readable_by_others(status):
        _log.warning("secret_file_is_readable path=%s mode=%04o", path, status.st_mode & 0o7777)


def is_readable_by_others(status: os.stat_result) -> bool:
    """Whether others may read or change it.

    Containers are given secrets as files of root, which a group may read that they are in.
    """
    allowed = status.st_mode & _OTHERS
    if status.st_uid == _ROOT:
        allowed &= ~_GROUP_READS
    return allowed != 0
