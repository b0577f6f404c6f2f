"""Changes of a key file: one at a time, and whole or not at all."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from splitserve_keys.key_entry import KeyEntry
from splitserve_keys.key_file import MAX_KEYS, KeyFileUnusable, Keys, format_keys, read_keys

_OWNER_ONLY = 0o600
# Nobody else may change the file, or read it who is not of its group.
_MOST_ALLOWED = 0o640


def change_keys(path: Path, change: Callable[[Keys], Mapping[str, KeyEntry]]) -> None:
    """Has `change` make new keys of those in `path`, which need not be there yet.

    Whoever reads finds the old keys or the new ones; who changes at the same time waits.
    Raises KeyFileUnusable, OSError, and whatever `change` raises, which leaves all as it was.
    """
    path = path.resolve()
    with _locked(path):
        keys = change(read_keys(path) if path.exists() else {})
        if len(keys) > MAX_KEYS:
            raise KeyFileUnusable(f"{path}: has {MAX_KEYS} keys; allowed: no more than that")
        _replace(path, format_keys(keys.values()))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # A file beside it, since the file itself is replaced.
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, _OWNER_ONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
    with os.fdopen(descriptor, "wb") as file:
        if path.exists():
            _keep_owner(descriptor, path)
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    fresh.replace(path)


def _keep_owner(descriptor: int, path: Path) -> None:
    """Who could read the file before can still: an operator may be another user than a service."""
    before, now = path.stat(), os.fstat(descriptor)
    if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode) & _MOST_ALLOWED | _OWNER_ONLY)
