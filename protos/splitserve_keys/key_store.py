"""Changes of a key file: one at a time, and whole or not at all."""

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
# In a folder of others nobody can have it make a file elsewhere.
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


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
        replace_file(path, format_keys(keys.values()))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # A file beside it, since the file itself is replaced.
    descriptor = os.open(path.with_name(f".{path.name}.lock"), _LOCK_FLAGS, _OWNER_ONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
