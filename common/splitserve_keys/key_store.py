"""Changes of a key file: one at a time, and atomic."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from splitserve_keys.key_entry import KeyEntry
from splitserve_keys.key_file import MAX_KEYS, KeyFileUnusable, Keys, format_keys, read_keys
from splitserve_rpc.private_files import replace_file

_OWNER_ONLY = 0o600
# O_NOFOLLOW: in a shared folder, nobody can redirect the lock file elsewhere.
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def change_keys(path: Path, change: Callable[[Keys], Mapping[str, KeyEntry]]) -> None:
    """Replaces the keys in `path` by those that `change` returns for them.

    A missing file counts as empty. Readers find the old keys or the new ones; concurrent changes
    wait. Raises KeyFileUnusable, OSError, and whatever `change` raises; the file is then unchanged.
    """
    path = path.resolve()
    with _locked(path):
        keys = change(read_keys(path) if path.exists() else {})
        if len(keys) > MAX_KEYS:
            raise KeyFileUnusable(f"{path}: has {MAX_KEYS} keys; allowed: no more than that")
        replace_file(path, format_keys(keys.values()))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Locks a file beside it, since the key file itself is replaced.
    descriptor = os.open(path.with_name(f".{path.name}.lock"), _LOCK_FLAGS, _OWNER_ONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
