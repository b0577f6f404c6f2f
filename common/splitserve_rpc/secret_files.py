"""Warning about secret files that other users of this machine can read."""

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
    """Logs once per file that others can read it. Ignores a file without status."""
    try:
        status = path.stat()
    except OSError:
        return
    if is_readable_by_others(status):
        _log.warning("secret_file_is_readable path=%s mode=%04o", path, status.st_mode & 0o7777)


def is_readable_by_others(status: os.stat_result) -> bool:
    """Returns whether others may read or change a file.

    Read access of the group to a file of root does not count: containers get their secrets that
    way.
    """
    allowed = status.st_mode & _OTHERS
    if status.st_uid == _ROOT:
        allowed &= ~_GROUP_READS
    return allowed != 0
