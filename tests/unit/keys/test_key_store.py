"""Changes of a key file, alone and side by side."""

from __future__ import annotations

import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from splitserve_keys.key_file import (
    ApiKey,
    KeyEntry,
    KeyFileUnusable,
    Keys,
    Scope,
    change_keys,
    read_keys,
)
from tests.support.processes.patience import PATIENCE_S

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
    with pytest.raises(KeyFileUnusable, match="is no file of keys"):
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
