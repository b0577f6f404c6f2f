"""API keys: an entry for each key, and the JSON file of all entries, without secrets."""

from __future__ import annotations

import enum
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from splitserve_common import parse_json, read_whole, replace_file

MAX_NOTE_CHARS = 256
NOTES = f"a text of at most {MAX_NOTE_CHARS} printable characters"
_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(Z|[+-][0-9]{2}:[0-9]{2})"
)
_TIMES = "a time like 2027-01-31T00:00:00Z"
_SHA256 = re.compile("[0-9a-f]{64}")


class EntryInvalid(ValueError):
    """Error: an entry is invalid. The message continues after a name of the entry."""


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """API key without its secret. `expires`, `revoked`: None for never."""

    key_id: str
    sha256: str = field(repr=False)
    tenant: str
    scopes: frozenset[Scope]
    created: datetime
    expires: datetime | None = None
    revoked: datetime | None = None
    note: str = ""

    @classmethod
    def of(cls, key: ApiKey, tenant: str, scopes: frozenset[Scope], created: datetime) -> KeyEntry:
        """Returns the entry of a newly drawn key."""
        return cls(key.key_id, key.sha256, tenant, scopes, created)

    def state_at(self, now: datetime) -> str:
        """Returns `valid`, `expired` or `revoked`."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "valid"

    @classmethod
    def from_json(cls, entry: object) -> KeyEntry:
        """Parses an entry. Raises EntryInvalid."""
        if not isinstance(entry, dict):
            raise EntryInvalid(" is not an object; allowed: an object with the fields of a key")
        for name in entry:
            if name not in _FIELDS:
                raise EntryInvalid(f" has {shown(name)}; allowed: {', '.join(_FIELDS)}")
        for name in _REQUIRED:
            if name not in entry:
                raise EntryInvalid(f".{name} is missing")
        note = entry.get("note", "")
        _check(is_key_id(entry["id"]), "id", entry["id"], "12 digits of 0-9a-f")
        _check(is_tenant_name(entry["tenant"]), "tenant", entry["tenant"], TENANT_NAMES)
        _check(is_note(note), "note", note, NOTES)
        return cls(
            key_id=entry["id"],
            sha256=_sha256(entry["sha256"]),
            tenant=entry["tenant"],
            scopes=_scopes(entry["scopes"]),
            created=_time("created", entry["created"]),
            expires=_time_or_never("expires", entry.get("expires")),
            revoked=_time_or_never("revoked", entry.get("revoked")),
            note=note,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object that `from_json` parses."""
        entry = {
            "id": self.key_id,
            "sha256": self.sha256,
            "tenant": self.tenant,
            "scopes": sorted(scope.value for scope in self.scopes),
            "created": time_text(self.created),
        }
        for name, time in (("expires", self.expires), ("revoked", self.revoked)):
            if time is not None:
                entry[name] = time_text(time)
        return entry | ({"note": self.note} if self.note else {})


_REQUIRED = ("id", "sha256", "tenant", "scopes", "created")
_FIELDS = (*_REQUIRED, "expires", "revoked", "note")


def is_note(note: object) -> bool:
    """Returns whether `note` is a valid note, as `NOTES` describes."""
    return isinstance(note, str) and len(note) <= MAX_NOTE_CHARS and note.isprintable()


def time_text(time: datetime) -> str:
    """Returns `time` as UTC text for files and tables, to the second."""
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _check(fits: bool, name: str, value: object, allowed: str) -> None:
    if not fits:
        raise EntryInvalid(f".{name} is {shown(value)}; allowed: {allowed}")


def shown(value: object) -> str:
    """Returns `value` as quoted in an error, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _sha256(value: object) -> str:
    # The value is not quoted: it might be the secret itself, put there by mistake.
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise EntryInvalid(".sha256 is invalid; allowed: 64 digits of 0-9a-f")
    return value


def _scopes(value: object) -> frozenset[Scope]:
    names = {scope.value: scope for scope in Scope}
    is_list = isinstance(value, list) and len(value) > 0
    _check(is_list, "scopes", value, f"a list of {', '.join(names)}")
    assert isinstance(value, list)
    for name in value:
        if not isinstance(name, str) or name not in names:
            raise EntryInvalid(f".scopes has {shown(name)}; allowed: {', '.join(names)}")
    return frozenset(names[name] for name in value)


def _time_or_never(name: str, value: object) -> datetime | None:
    return None if value is None else _time(name, value)


def _time(name: str, value: object) -> datetime:
    problem = EntryInvalid(f".{name} is {shown(value)}; allowed: {_TIMES}")
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        raise problem
    try:
        return datetime.fromisoformat(value).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise problem from error


# -- API key in the form that its owner has: `sk-ss-ID-SECRET` -------------------------------------
#
# The secret is random, so reversing its plain SHA-256 is as hard as guessing the secret. A slow
# hash would add nothing, and each call would pay for it.

PREFIX = "sk-ss-"
_ID_BYTES = 6
_SECRET_BYTES = 32
_ID = "[0-9a-f]{12}"
# The secret may contain the separator, the id may not.
_KEY = re.compile(rf"{PREFIX}(?P<key_id>{_ID})-(?P<secret>[A-Za-z0-9_-]{{43}})")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """API key. `key_id` is public, `secret` is not."""

    key_id: str
    secret: str = field(repr=False)

    @classmethod
    def draw(cls) -> ApiKey:
        """Returns a new random key."""
        return cls(secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES))

    @classmethod
    def parse(cls, text: str) -> ApiKey | None:
        """Returns the key in `text`; None if the form is wrong."""
        match = _KEY.fullmatch(text)
        return None if match is None else cls(match["key_id"], match["secret"])

    @property
    def text(self) -> str:
        """Key in its written form."""
        return f"{PREFIX}{self.key_id}-{self.secret}"

    @property
    def sha256(self) -> str:
        """SHA-256 of the secret in hexadecimal, as the key file stores it."""
        return hashlib.sha256(self.secret.encode("ascii")).hexdigest()

    def has(self, sha256: str) -> bool:
        """Returns whether the secret has this digest. Takes constant time."""
        return hmac.compare_digest(self.sha256, sha256)


def is_key_id(text: object) -> bool:
    """Returns whether `text` has the form of a key id."""
    return isinstance(text, str) and re.fullmatch(_ID, text) is not None


# -- Scopes of a credential ------------------------------------------------------------------------


class Scope(enum.Enum):
    """Purposes of a credential, as scheduler.proto specifies under "Callers"."""

    GENERATE = "generate"
    GATEWAY = "gateway"
    TENANTS = "tenants"
    OPERATOR = "operator"


# -- Rules for the names of tenants ----------------------------------------------------------------

MAX_TENANT_CHARS = 128
TENANT_NAMES = f"a text of 1 to {MAX_TENANT_CHARS} printable characters"


def is_tenant_name(name: object) -> bool:
    """Returns whether `name` is a valid tenant name: printable, since logs contain names."""
    return isinstance(name, str) and 0 < len(name) <= MAX_TENANT_CHARS and name.isprintable()


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
        raise ValueError("is not a key file; allowed: an object with the fields version, keys")
    version, entries = document["version"], document["keys"]
    if type(version) is not int or version != VERSION:
        raise ValueError(f"version is {shown(version)}; allowed: {VERSION}")
    if not isinstance(entries, list) or len(entries) > MAX_KEYS:
        raise ValueError(f"keys is not a list, or is too long; allowed: {MAX_KEYS} entries")
    keys: dict[str, KeyEntry] = {}
    for number, entry in enumerate(entries):
        try:
            key = KeyEntry.from_json(entry)
        except EntryInvalid as error:
            raise ValueError(f"keys[{number}]{error}") from error
        if key.key_id in keys:
            raise ValueError(f"keys[{number}].id is {key.key_id!r}, which another entry has")
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
        raise ValueError("an object has a duplicate field")
    return fields


# -- Changes of a key file: one at a time, and atomic ----------------------------------------------

_OWNER_ONLY = 0o600
# O_NOFOLLOW: in a shared folder, other users cannot redirect the lock file.
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
            raise KeyFileUnusable(
                f"{path}: would have {len(keys)} keys; allowed: at most {MAX_KEYS}"
            )
        replace_file(path, format_keys(keys.values()))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Locks another file, since the key file itself is replaced.
    descriptor = os.open(path.with_name(f".{path.name}.lock"), _LOCK_FLAGS, _OWNER_ONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
