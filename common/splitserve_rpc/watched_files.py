"""Values read from files, updated when the files change; unusable contents are ignored."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from splitserve_rpc.whole_files import read_whole

_log = logging.getLogger(__name__)

T = TypeVar("T")
# Maximum size of a file: a credential or certificates.
_MAX_BYTES = 2**20
_Stamp = tuple[tuple[int, int, int], ...]


class FilesUnusable(Exception):
    """Error: a file is unusable. The message names the file and the reason, on one line."""


class WatchedFiles(Generic[T]):
    """Last usable value that was read from the files. Thread-safe."""

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """`name`: prefix of the log events. `read`: reads one value from all files.

        Raises FilesUnusable, as `read` does.
        """
        self._name = name
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._problem = ""
        # Stamped before reading, so that a change in between is read again.
        self._stamp = self._look()
        self._value = read()

    @property
    def value(self) -> T:
        """Value as of the last check; a new object after a change."""
        return self._value

    def current(self) -> T:
        """Reads the files if they have changed, and returns the value. Blocks."""
        self.refresh()
        return self._value

    def refresh(self) -> bool:
        """Reads the files if they have changed. Returns whether the value is new. Blocks."""
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
        # May fail for a moment, while files are being changed one after the other.
        value = self._read()
        self._stamp = stamp
        if value == self._value:
            return False
        self._value = value
        _log.info("%s_reloaded paths=%s", self._name, ",".join(map(str, self._paths)))
        return True

    def _note(self, problem: str) -> None:
        """Logs a problem unless it repeats the last logged one."""
        if problem != self._problem:
            self._problem = problem
            _log.warning("%s_unusable problem=%r", self._name, problem)

    def _look(self) -> _Stamp:
        return tuple(map(_stamp, self._paths))


def read_bytes(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """Returns the content of a file. Raises FilesUnusable."""
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
