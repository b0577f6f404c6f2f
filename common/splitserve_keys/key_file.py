"""Key file: JSON with a version and an entry for each API key, without secrets."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from splitserve_keys.key_entry import EntryInvalid, KeyEntry, shown
from splitserve_rpc.files import read_whole, replace_file
from splitserve_rpc.text import parse_json

VERSION = 1
MAX_KEYS = 100_000
_MAX_BYTES = 64 * 2**20

# Entries by key id, in the order of the file.
Keys = Mapping[str, KeyEntry]


class KeyFileUnusable(Exception):
    """Error: the message names file, entry, field and what is allowed, on one line."""


def read_keys(path: Path) -> Keys:
    """Reads a key file. Raises KeyFileUnusable."""
    try:
        content = read_whole(path, _MAX_BYTES)
    except OSError as error:
        raise KeyFileUnusable(f"{path}: {error.strerror}") from error
    try:
        return parse_keys(content)
    except ValueError as error:
        raise KeyFileUnusable(f"{path}: {error}") from error


def parse_keys(content: bytes) -> Keys:
    """Parses the content of a key file. Raises ValueError that names entry and field."""
    try:
        document = parse_json(content.decode("utf-8"), object_pairs_hook=_object)
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(document, dict) or set(document) != {"version", "keys"}:
        raise ValueError("is no file of keys; allowed: an object with the fields version, keys")
    version, entries = document["version"], document["keys"]
    if type(version) is not int or version != VERSION:
        raise ValueError(f"version is {shown(version)}; allowed: {VERSION}")
    if not isinstance(entries, list) or len(entries) > MAX_KEYS:
        raise ValueError(f"keys is no list, or too long; allowed: {MAX_KEYS} entries")
    keys: dict[str, KeyEntry] = {}
    for number, entry in enumerate(entries):
        try:
            key = KeyEntry.from_json(entry)
        except EntryInvalid as error:
            raise ValueError(f"keys[{number}]{error}") from error
        if key.key_id in keys:
            raise ValueError(f"keys[{number}].id is {key.key_id!r}, as that of another entry")
        keys[key.key_id] = key
    return keys


def format_keys(keys: Iterable[KeyEntry]) -> bytes:
    """Returns the content that `parse_keys` parses, one entry per line."""
    lines = ",\n".join(json.dumps(key.to_json(), ensure_ascii=False) for key in keys)
    return f'{{"version": {VERSION}, "keys": [\n{lines}\n]}}\n'.encode()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object as dict. Raises ValueError for a repeated field."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("an object has a field twice")
    return fields


# -- Changes of a key file: one at a time, and atomic ----------------------------------------------

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
