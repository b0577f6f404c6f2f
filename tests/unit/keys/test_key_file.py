"""Tests API keys and the file of their digests."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve_keys import (
    ApiKey,
    KeyEntry,
    KeyFileUnusable,
    Keys,
    Scope,
    change_keys,
    format_keys,
    is_key_id,
    parse_keys,
    read_keys,
)
from tests.support.processes.patience import PATIENCE_S

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
def test_content_is_refused_when_it_is_no_key_file(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+\Z"):
        parse_keys(content)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"version": 1, "version": 1, "keys": []}', "an object has a duplicate field"),
        (b"[]", "allowed: an object with the fields version, keys"),
        (_document(more=1), "allowed: an object with the fields version, keys"),
        (_document(version=2), "version is 2; allowed: 1"),
        (_document(version=True), "version is True; allowed: 1"),
        (_document(keys={}), "keys is not a list"),
        (_document(ENTRY, 5), r"keys\[1\] is not an object"),
        (_document(ENTRY, ENTRY), r"keys\[1\].id is '0123456789ab', which another entry has"),
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


ADD = """
import sys
from pathlib import Path
from splitserve_cli.keys import main
for _ in range(5):
    assert main(["add", sys.argv[1], "--tenant", sys.argv[2]]) == 0
"""


def _entry(tenant: str = "a") -> KeyEntry:
    created = datetime(2026, 1, 31, tzinfo=UTC)
    return KeyEntry.of(ApiKey.draw(), tenant, frozenset({Scope.GENERATE}), created)


def _add(path: Path, entry: KeyEntry) -> None:
    change_keys(path, lambda keys: {**keys, entry.key_id: entry})


def test_file_is_its_owners_alone_when_it_is_made(tmp_path: Path) -> None:
    entry, path = _entry(), tmp_path / "keys.json"
    _add(path, entry)
    assert read_keys(path) == {entry.key_id: entry}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(("before", "after"), [(0o640, 0o640), (0o666, 0o640), (0o400, 0o600)])
def test_group_can_read_it_still_when_it_could_before(
    before: int, after: int, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    _add(path, _entry())
    path.chmod(before)
    _add(path, _entry())
    assert stat.S_IMODE(path.stat().st_mode) == after


def test_link_stays_one_when_what_it_leads_to_is_changed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "keys.json", tmp_path / "keys.json"
    _add(target, _entry())
    link.symlink_to(target)
    _add(link, _entry())
    assert link.is_symlink()
    assert len(read_keys(target)) == 2


def test_nothing_is_changed_when_the_change_fails(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    _add(path, _entry())
    before = path.read_bytes()

    def fail(keys: Keys) -> Keys:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        change_keys(path, fail)
    assert path.read_bytes() == before
    _add(path, _entry())
    assert len(read_keys(path)) == 2


def test_file_is_left_alone_when_it_is_none_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("{}")
    with pytest.raises(KeyFileUnusable, match="is not a key file"):
        _add(path, _entry())
    assert path.read_text() == "{}"


def test_no_key_is_lost_when_several_commands_add_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", ADD, path, f"tenant {number}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in range(4)
    ]
    printed = [command.communicate(timeout=PATIENCE_S)[0].split() for command in commands]
    keys = [ApiKey.parse(text) for texts in printed for text in texts]
    entries = read_keys(path)
    assert len(keys) == len(entries) == 20
    assert all(key is not None and key.has(entries[key.key_id].sha256) for key in keys)


def test_keys_are_read_as_they_were_drawn_and_differ() -> None:
    keys = [ApiKey.draw() for _ in range(200)]
    assert [ApiKey.parse(key.text) for key in keys] == keys
    assert len({key.key_id for key in keys}) == len({key.secret for key in keys}) == 200
    assert all(is_key_id(key.key_id) for key in keys)


def test_secret_is_not_shown_when_a_key_is() -> None:
    key = ApiKey.draw()
    assert key.secret not in repr(key)
    assert key.key_id in repr(key)


def test_key_has_the_digest_of_its_secret_and_no_other() -> None:
    key = ApiKey("0123456789ab", "s" * 43)
    assert key.has(hashlib.sha256(b"s" * 43).hexdigest())
    assert not key.has(hashlib.sha256(b"t" * 43).hexdigest())
    assert not key.has("0" * 64)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sk-ss-",
        "sk-ss-0123456789ab",
        "sk-ss-0123456789ab-" + "s" * 42,
        "sk-ss-0123456789ab-" + "s" * 44,
        "sk-ss-0123456789ab-" + "s" * 42 + "\n",
        "sk-ss-0123456789ab-" + "s" * 43 + "\n",
        "sk-ss-0123456789AB-" + "s" * 43,
        "sk-ss-01234-6789ab-" + "s" * 43,
        "sk-0123456789ab-" + "s" * 43,
        " sk-ss-0123456789ab-" + "s" * 43,
        "sk-ss-012345678\u0669ab-" + "s" * 43,
    ],
)
def test_text_is_no_key_when_its_form_is_another(text: str) -> None:
    assert ApiKey.parse(text) is None


@given(st.text())
def test_any_text_is_a_key_that_says_it_again_or_none(text: str) -> None:
    key = ApiKey.parse(text)
    assert key is None or key.text == text
