"""Callers by their API keys."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from scheduler_service.callers.caller import Caller
from scheduler_service.callers.refusals import expired, not_valid
from splitserve_keys.api_key import ApiKey
from splitserve_keys.key_file import KeyFileUnusable, Keys, read_keys
from splitserve_rpc.watched_files import FilesUnusable

# Compared with where there is no such key, so that this takes as long.
_OF_NO_KEY = "0" * 64


def read_key_file(path: Path) -> Keys:
    """Raises FilesUnusable."""
    try:
        return read_keys(path)
    except KeyFileUnusable as error:
        raise FilesUnusable(str(error)) from error


def caller_with_key(keys: Keys, text: str, now: datetime) -> Caller:
    """Whose key `text` is. Raises DomainError(CALLER_UNKNOWN)."""
    key = ApiKey.parse(text)
    if key is None:
        raise not_valid()
    entry = keys.get(key.key_id)
    is_genuine = key.has(_OF_NO_KEY if entry is None else entry.sha256)
    if entry is None or not is_genuine or entry.revoked is not None:
        raise not_valid()
    if entry.expires is not None and entry.expires <= now:
        raise expired()
    return Caller(f"key:{entry.key_id}", entry.tenant, entry.scopes)
