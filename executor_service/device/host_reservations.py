"""Memory of this machine that executors have reserved and not yet touched.

The pages of a pool are taken when they are first written, so memory that another executor has
planned for still looks free. Executors therefore write down what they reserve: a file for each, in
a directory that they share, locked as long as its process lives. The lock of a process that was
killed is gone, and whoever looks next removes its file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from splitserve_rpc.json_text import parse_json

_log = logging.getLogger(__name__)

_LOCK, _SUFFIX = "lock", ".reservation"


@dataclass(frozen=True, slots=True)
class _Reservation:
    """`used_bytes`: what process `pid` had when it reserved. `group`: of executors that share."""

    pid: int
    group: int
    num_bytes: int
    used_bytes: int

    @property
    def untouched_bytes(self) -> int:
        """What the process has not taken yet, as far as can be seen."""
        taken = max(0, _used_bytes(self.pid) - self.used_bytes)
        return max(0, self.num_bytes - taken)


class HostReservations:
    """What executors of this machine have reserved. Without a directory this one knows of none."""

    def __init__(self, directory: Path | None = None, num_sharing: int = 1) -> None:
        """Makes `directory` if it is missing; one that others could write to is not used.

        `num_sharing`: executors that this one's parent starts together, this one included.
        """
        self._directory = directory if directory is None or _is_usable(directory) else None
        self._num_sharing = num_sharing
        self._group = os.getppid()

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Keeps other executors from planning meanwhile. Call the methods below inside."""
        if self._directory is None:
            yield
            return
        with (self._directory / _LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def share_of(self, available_bytes: int, weights_bytes: int) -> int:
        """Returns what this executor may plan with, of the `available_bytes` of this machine.

        Left out is what others have reserved, the share of those that start together with this one
        and have not reserved yet, and the weights of these, `weights_bytes` each.
        """
        others = list(self._others())
        left = available_bytes - sum(each.untouched_bytes for each in others)
        num_here = sum(each.group == self._group for each in others)
        num_coming = max(0, self._num_sharing - 1 - num_here)
        return max(0, left - num_coming * weights_bytes) // (num_coming + 1)

    def reserve(self, num_bytes: int) -> Callable[[], None]:
        """Writes down that this process takes `num_bytes` more; returns what takes that back."""
        if self._directory is None:
            return _nothing
        pid = os.getpid()
        path = self._directory / f"{pid}-{secrets.token_hex(8)}{_SUFFIX}"
        reservation = _Reservation(pid, self._group, num_bytes, _used_bytes(pid))
        # Until it is released, or its process ends: closed, the file would lose its lock.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps(asdict(reservation)).encode())

        def release() -> None:
            path.unlink(missing_ok=True)
            os.close(descriptor)

        return release

    def _others(self) -> Iterator[_Reservation]:
        """All reservations of processes that live; files of others are removed."""
        if self._directory is None:
            return
        for path in self._directory.glob(f"*{_SUFFIX}"):
            try:
                with path.open("r", encoding="ascii") as file:
                    if _is_locked(file.fileno()):
                        yield _Reservation(**parse_json(file.read()))
                    else:
                        path.unlink(missing_ok=True)
            except (OSError, ValueError, TypeError):
                continue  # it has just gone, or is nobody's


def default_directory() -> Path:
    """Of this user, where no other is told."""
    return Path(tempfile.gettempdir()) / f"splitserve-{os.getuid()}"


def _is_usable(directory: Path) -> bool:
    """Makes it, for this user alone."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        problem = ""
        if not stat.S_ISDIR(found.st_mode):
            problem = "it is no directory"
        elif found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            problem = "others can write to it"
        elif not os.access(directory, os.W_OK):
            problem = "it cannot be written to"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        message = "reservations_not_shared directory=%r reason=%r: other executors are not counted"
        _log.warning(message, str(directory), problem)
    return not problem


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _used_bytes(pid: int) -> int:
    """What a process has for itself; 0 if it cannot be seen from here. Mapped files are not its."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return int(memory.rss) - int(getattr(memory, "shared", 0))


def _nothing() -> None:
    """Takes back nothing."""
