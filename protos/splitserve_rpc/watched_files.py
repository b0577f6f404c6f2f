"""What files say, read again when they change; what cannot be used is not taken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class FilesUnusable(Exception):
    """The message names the file and says what is wrong with it."""


class WatchedFiles(Generic[T]):
    """What the files said last that was of use. `current` may be called in any thread."""

    def __init__(self, kind: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """`kind`: of files, as the log calls them. `read` makes one value of all of them.

        Raises FilesUnusable, as `read` does.
        """
        self._kind = kind
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._problem = ""
        self._stamp = self._look()
        self._value = read()

    def current(self) -> T:
        """Looks at the files, and reads them if they have changed."""
        with self._lock:
            try:
                stamp = self._look()
                if stamp != self._stamp:
                    # Files that are changed one after the other do not fit for a moment.
                    self._value = self._read()
                    self._stamp = stamp
                    paths = ",".join(map(str, self._paths))
                    _log.info("%s_files_reloaded paths=%s", self._kind, paths)
                self._problem = ""
            except FilesUnusable as error:
                self._note(str(error))
            return self._value

    def _note(self, problem: str) -> None:
        """Logs it, but not each time that somebody looks."""
        if problem != self._problem:
            self._problem = problem
            _log.warning("%s_files_unusable problem=%r", self._kind, problem)

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(map(_stamp, self._paths))


def read_bytes(path: Path) -> bytes:
    """The content. Raises FilesUnusable."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FilesUnusable(f"{path}: {error.strerror}") from error


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise FilesUnusable(f"{path}: {error.strerror}") from error
    return (status.st_mtime_ns, status.st_size, status.st_ino)
