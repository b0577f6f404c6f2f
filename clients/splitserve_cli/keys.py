"""Command `splitserve keys`: the API keys that a scheduler accepts."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from splitserve_keys import (
    NOTES,
    TENANT_NAMES,
    ApiKey,
    KeyEntry,
    KeyFileUnusable,
    Keys,
    Scope,
    is_note,
    is_tenant_name,
    read_keys,
    time_text,
)

_HELP = """\
Adds, lists and revokes API keys in a file that schedulers read (--api-keys FILE); running ones
reload it. The file contains no secrets: a key is shown once, when it is added.
"""
_SCOPES = """\
what the key permits, repeatable: generate (default); gateway: send requests of other callers;
tenants: choose the tenant of a request; operator: operate the cluster
"""
_EXPIRES = "expiry: 30d, 12h, or a date such as 2027-01-31 (start of the day, UTC); default: never"
_SPAN = re.compile(r"([0-9]{1,5})([dh])")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    now = datetime.now(UTC)
    arguments = _parser(now).parse_args(argv)
    try:
        match arguments.action:
            case "add":
                return _add(arguments, now)
            case "revoke":
                return _revoke(arguments, now)
            case _:
                return _list(arguments, now)
    except (KeyFileUnusable, _Refused) as error:
        problem = str(error)
    except OSError as error:
        problem = f"{arguments.file}: {error.strerror}"
    sys.stderr.write(f"splitserve keys: {problem}\n")
    return 1


class _Refused(Exception):
    """Reports that a command is impossible; the message is one line for users."""


def _parser(now: datetime) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="splitserve keys", description=_HELP)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="create a key, and print only the key on standard output")
    listing = actions.add_parser("list", help="list all keys, without their secrets")
    revoke = actions.add_parser("revoke", help="revoke a key; its entry stays, as old logs name it")
    for action in (add, listing, revoke):
        action.add_argument("file", metavar="FILE", type=Path, help="file of API keys")
    add.add_argument(
        "--tenant", type=_tenant, required=True, help="tenant of the requests with this key"
    )
    names = [scope.value for scope in Scope]
    add.add_argument("--scope", action="append", choices=names, help=_SCOPES)
    add.add_argument("--expires", type=lambda text: _expires(text, now), help=_EXPIRES)
    add.add_argument("--note", type=_note, default="", help="free text")
    listing.add_argument("--json", action="store_true", help="one JSON array")
    revoke.add_argument("key_id", metavar="ID", help="id of the key, as list shows it")
    return parser


def _add(arguments: argparse.Namespace, now: datetime) -> int:
    key = ApiKey.draw()
    scopes = frozenset(map(Scope, arguments.scope or [Scope.GENERATE.value]))
    entry = KeyEntry.of(key, arguments.tenant, scopes, now)
    entry = replace(entry, expires=arguments.expires, note=arguments.note)

    def with_entry(keys: Keys) -> Keys:
        if key.key_id in keys:
            raise _Refused(f"key id {key.key_id} exists already; run the command again")
        return {**keys, key.key_id: entry}

    _change(arguments.file, with_entry)
    sys.stdout.write(f"{key.text}\n")
    expires = "never" if entry.expires is None else time_text(entry.expires)
    sys.stderr.write(
        f"{arguments.file}: key {key.key_id} of tenant {entry.tenant!r}, for {_names(entry)}; "
        f"expires: {expires}. The key is not shown again.\n"
    )
    return 0


def _revoke(arguments: argparse.Namespace, now: datetime) -> int:
    def without(keys: Keys) -> Keys:
        entry = keys.get(arguments.key_id)
        if entry is None:
            raise _Refused(f"{arguments.file}: no key has the id {arguments.key_id[:80]!r}")
        if entry.revoked is not None:
            raise _Refused(f"{entry.key_id} was already revoked at {time_text(entry.revoked)}")
        return {**keys, entry.key_id: replace(entry, revoked=now)}

    if not arguments.file.exists():
        raise _Refused(f"{arguments.file}: No such file or directory")
    _change(arguments.file, without)
    sys.stderr.write(f"{arguments.file}: key {arguments.key_id} is revoked\n")
    return 0


def _change(file: Path, change: Callable[[Keys], Keys]) -> None:
    try:
        from splitserve_keys import change_keys
    except ImportError as error:
        raise _Refused("key files can be changed on Linux and macOS only") from error
    change_keys(file, change)


def _list(arguments: argparse.Namespace, now: datetime) -> int:
    entries = list(read_keys(arguments.file).values())
    if arguments.json:
        listed = [_as_json(entry, now) for entry in entries]
        sys.stdout.write(json.dumps(listed, indent=2) + "\n")
        return 0
    rows = [("ID", "TENANT", "SCOPES", "STATE", "CREATED", "EXPIRES", "NOTE")]
    for entry in entries:
        expires = "never" if entry.expires is None else time_text(entry.expires)
        created = time_text(entry.created)
        state = entry.state_at(now)
        row = (entry.key_id, entry.tenant, _names(entry), state, created, expires, entry.note)
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    return 0


def _as_json(entry: KeyEntry, now: datetime) -> dict[str, object]:
    """Returns the fields of a key in the file, without the digest."""
    fields = entry.to_json()
    del fields["sha256"]
    return fields | {"state": entry.state_at(now)}


def _names(entry: KeyEntry) -> str:
    return ", ".join(sorted(scope.value for scope in entry.scopes))


# -- values of flags -------------------------------------------------------------------------------


def _tenant(text: str) -> str:
    return _checked(text, is_tenant_name(text), TENANT_NAMES)


def _note(text: str) -> str:
    return _checked(text, is_note(text), NOTES)


def _checked(text: str, fits: bool, allowed: str) -> str:
    if not fits:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not allowed; allowed: {allowed}")
    return text


def _expires(text: str, now: datetime) -> datetime:
    time = None
    try:
        if match := _SPAN.fullmatch(text):
            number, unit = int(match[1]), match[2]
            time = now + (timedelta(days=number) if unit == "d" else timedelta(hours=number))
        elif _DATE.fullmatch(text):
            time = datetime.fromisoformat(text).replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        pass
    if time is None or time <= now:
        allowed = "30d, 12h, or a future date such as 2027-01-31"
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not allowed; allowed: {allowed}")
    return time
