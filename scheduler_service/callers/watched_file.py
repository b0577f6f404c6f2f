"""A file that is read again when it changes; while it cannot be used, what it said before holds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")
_Stamp = tuple[int, int, int]


class FileUnusable(Exception):
    """The message names the file and says what is wrong with it; one line for people."""


class WatchedFile(Generic[T]):
    """`value`: what `read` made of the file last; it raises FileUnusable."""

    def __init__(self, path: Path, read: Callable[[Path], T]) -> None:
        """Reads it. Raises FileUnusable."""
        self._path = path
        self._read = read
        self._problem = ""
        # Looked at before it is read: what changes in between is read again.
        self._stamp = _look(path)
        self.value = read(path)

    def refresh(self) -> bool:
        """Reads the file if it has changed; whether there is a new value. Blocks."""
        try:
            stamp = _look(self._path)
            if stamp == self._stamp:
                return False
            self.value = self._read(self._path)
        except FileUnusable as error:
            if str(error) != self._problem:
                _log.warning("callers_file_unusable problem=%r", str(error))
            self._problem = str(error)
            return False
        self._stamp, self._problem = stamp, ""
        return True


def _look(path: Path) -> _Stamp:
    """Raises FileUnusable."""
    try:
        status = path.stat()
    except OSError as error:
        raise FileUnusable(f"{path}: {error.strerror}") from error
    return (status.st_mtime_ns, status.st_size, status.st_ino)
