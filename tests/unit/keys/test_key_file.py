"""The file of keys: what is written is read, what is wrong is refused by name."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve_keys.key_file import (
    KeyEntry,
    KeyFileUnusable,
    Scope,
    format_keys,
    parse_keys,
    read_keys,
)

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "75"))
ENTRY: dict[str, Any] = {
    "id": "0123456789ab",
    "sha256": "0" * 64,
    "tenant": "a",
    "scopes": ["generate"],
    "created": "2026-01-31T00:00:00Z",
}

_times = st.datetimes(timezones=st.just(UTC)).map(lambda time: time.replace(microsecond=0))
_printable = st.text(st.characters(exclude_categories=("C", "Z")))
_entries = st.builds(
    KeyEntry,
    key_id=st.text("0123456789abcdef", min_size=12, max_size=12),
    sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
    tenant=_printable.filter(lambda name: 0 < len(name) <= 128),
    scopes=st.frozensets(st.sampled_from(Scope), min_size=1),
    created=_times,
    expires=st.none() | _times,
    revoked=st.none() | _times,
    note=_printable.filter(lambda note: len(note) <= 256),
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def _document(*entries: object, **fields: object) -> bytes:
    return json.dumps({"version": 1, "keys": list(entries)} | fields).encode()


@settings(max_examples=NUM_EXAMPLES)
@given(st.lists(_entries, unique_by=lambda entry: entry.key_id))
def test_keys_are_read_as_they_were_written(entries: list[KeyEntry]) -> None:
    assert list(parse_keys(format_keys(entries)).values()) == entries


@settings(max_examples=NUM_EXAMPLES)
@given(st.sampled_from([*ENTRY, "expires", "revoked", "note"]), _json)
def test_entry_is_read_again_or_refused_when_a_field_is_anything(name: str, value: object) -> None:
    said = ""
    try:
        keys = parse_keys(_document(ENTRY | {name: value}))
    except ValueError as error:
        said = str(error)
    assert said.startswith(f"keys[0].{name} ") or parse_keys(format_keys(keys.values())) == keys


@settings(max_examples=NUM_EXAMPLES)
@given(st.binary() | _json.map(lambda document: json.dumps(document).encode()))
def test_content_is_refused_with_a_line_when_it_is_none_of_ours(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+\Z"):
        parse_keys(content)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"version": 1, "version": 1, "keys": []}', "an object has a field twice"),
        (b"[]", "allowed: an object with the fields version, keys"),
        (_document(more=1), "allowed: an object with the fields version, keys"),
        (_document(version=2), "version is 2; allowed: 1"),
        (_document(version=True), "version is True; allowed: 1"),
        (_document(keys={}), "keys is no list"),
        (_document(ENTRY, 5), r"keys\[1\] is no object"),
        (_document(ENTRY, ENTRY), r"keys\[1\].id is '0123456789ab', as that of another entry"),
        (_document({}), r"keys\[0\].id is missing"),
        (_document(ENTRY | {"secret": "x"}), r"keys\[0\] has 'secret'; allowed: id, sha256"),
        (_document(ENTRY | {"id": "0-2"}), r"keys\[0\].id is '0-2'; allowed: 12 digits of 0-9a-f"),
        (_document(ENTRY | {"tenant": ""}), r"tenant is ''; allowed: a text of 1 to 128 printable"),
        (_document(ENTRY | {"tenant": "a\nb"}), r"tenant is 'a\\nb'; allowed"),
        (_document(ENTRY | {"tenant": "t" * 129}), r"tenant is 't+\.\.\.; allowed"),
        (_document(ENTRY | {"scopes": []}), r"scopes is \[\]; allowed: a list of generate, gate"),
        (_document(ENTRY | {"scopes": ["all"]}), "scopes has 'all'; allowed: generate, gateway"),
        (_document(ENTRY | {"created": "2026-01-31"}), "allowed: a time like 2027-01-31T00:00:00Z"),
        (_document(ENTRY | {"expires": "2026-02-30T00:00:00Z"}), "expires is '2026-02-30T"),
        (_document(ENTRY | {"revoked": 5}), "revoked is 5; allowed: a time like"),
        (_document(ENTRY | {"note": "n" * 257}), "note is 'n+.*; allowed: a text of at most 256"),
    ],
)
def test_file_is_refused_by_entry_and_field_when_it_is_wrong(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "keys.json").write_bytes(content)
    with pytest.raises(KeyFileUnusable, match=problem) as raised:
        read_keys(tmp_path / "keys.json")
    assert str(raised.value).startswith(f"{tmp_path}/keys.json: ")


def test_digest_is_not_quoted_when_a_secret_stands_there_by_mistake() -> None:
    with pytest.raises(ValueError, match="sha256") as raised:
        parse_keys(_document(ENTRY | {"sha256": "my secret"}))
    assert "my secret" not in str(raised.value)


def test_file_is_named_when_it_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeyFileUnusable, match=r"keys\.json: No such file or directory"):
        read_keys(tmp_path / "keys.json")


def test_times_are_those_of_utc_when_they_were_written_elsewhere() -> None:
    (entry,) = parse_keys(_document(ENTRY | {"expires": "2027-01-31T02:00:00+02:00"})).values()
    assert entry.expires == datetime(2027, 1, 31, tzinfo=timezone(timedelta(0)))


def test_state_is_what_holds_at_a_time() -> None:
    (entry,) = parse_keys(_document(ENTRY | {"expires": "2027-01-31T00:00:00Z"})).values()
    end = datetime(2027, 1, 31, tzinfo=UTC)
    assert entry.state_at(end - timedelta(seconds=1)) == "valid"
    assert entry.state_at(end) == "expired"
    (revoked,) = parse_keys(_document(ENTRY | {"revoked": "2027-01-31T00:00:00Z"})).values()
    assert revoked.state_at(end) == "revoked"
