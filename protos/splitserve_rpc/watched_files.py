"""What files say, read again when they change; what cannot be used is not taken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from splitserve_rpc.whole_files import read_whole

_log = logging.getLogger(__name__)

T = TypeVar("T")
# A credential, or certificates.
_MAX_BYTES = 2**20
_Stamp = tuple[tuple[int, int, int], ...]


class FilesUnusable(Exception):
    """The message names the file and says what is wrong with it; one line for people."""


class WatchedFiles(Generic[T]):
    """What the files said last that was of use. Its methods may be called in any thread."""

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """`name`: with which events begin in the log. `read` makes one value of all of them.

        Raises FilesUnusable, as `read` does.
        """
        self._name = name
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._problem = ""
        # Looked at before they are read: what changes in between is read again.
        self._stamp = self._look()
        self._value = read()

    @property
    def value(self) -> T:
        """As of the last look; another object when it has changed."""
        return self._value

    def current(self) -> T:
        """Looks at the files, and reads them if they have changed. Blocks."""
        self.refresh()
        return self._value

    def refresh(self) -> bool:
        """Does the same; whether there is a new value."""
        with self._lock:
            try:
                is_new = self._read_again()
                self._problem = ""
                return is_new
            except FilesUnusable as error:
                self._note(str(error))
                return False

    def _read_again(self) -> bool:
        stamp = self._look()
        if stamp == self._stamp:
            return False
        # Files that are changed one after the other do not fit for a moment.
        value = self._read()
        self._stamp = stamp
        if value == self._value:
            return False
        self._value = value
        _log.info("%s_reloaded paths=%s", self._name, ",".join(map(str, self._paths)))
        return True

    def _note(self, problem: str) -> None:
        """Logs it, but not each time that somebody looks."""
        if problem != self._problem:
            self._problem = problem
            _log.warning("%s_unusable problem=%r", self._name, problem)

    def _look(self) -> _Stamp:
        return tuple(map(_stamp, self._paths))


def read_bytes(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """The content. Raises FilesUnusable."""
    try:
        return read_whole(path, max_bytes)
    except OSError as error:
        raise FilesUnusable(f"{path}: {error.strerror}") from error


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise FilesUnusable(f"{path}: {error.strerror}") from error
    return (status.st_mtime_ns, status.st_size, status.st_ino)
