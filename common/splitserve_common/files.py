"""Files that only their owner may read, and atomic replacement of files."""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

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


# -- Reader of small regular files that does not block ---------------------------------------------


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a regular file. Raises OSError with the reason in `strerror`.

    Refuses other files: a pipe without a writer and a device have no end.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"is too large; allowed: {max_bytes} bytes")
    return content


# -- Warning about secret files that other users of this machine can read --------------------------

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


# -- Values read from files, updated when the files change; unusable contents are ignored ----------


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
