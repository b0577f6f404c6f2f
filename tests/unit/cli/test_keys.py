"""`splitserve keys`: adding, listing and revoking keys."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from splitserve_cli.main import main
from splitserve_keys import ApiKey, Scope, read_keys

Capture = pytest.CaptureFixture[str]


def _add(file: Path, capsys: Capture, *flags: str) -> ApiKey:
    assert main(["keys", "add", str(file), *flags]) == 0
    (text,) = capsys.readouterr().out.splitlines()
    key = ApiKey.parse(text)
    assert key is not None
    return key


def _refusal(capsys: Capture, *argv: str) -> str:
    """The one line that `argv` is answered with."""
    assert main(["keys", *argv]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("splitserve keys: ")
    return line.removeprefix("splitserve keys: ")


def test_add_prints_the_key_alone_and_stores_its_digest(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "keys.json"
    key = _add(file, capsys, "--tenant=team a", "--note=for trials")
    entry = read_keys(file)[key.key_id]
    assert key.has(entry.sha256)
    assert (entry.tenant, entry.note, entry.expires) == ("team a", "for trials", None)
    assert entry.scopes == {Scope.GENERATE}
    assert key.secret not in file.read_text()


def test_add_says_to_people_what_the_key_is_for(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "keys.json"
    flags = ["--tenant=a", "--scope=gateway", "--scope=tenants"]
    assert main(["keys", "add", str(file), *flags]) == 0
    captured = capsys.readouterr()
    assert "tenant 'a', for gateway, tenants; expires: never" in captured.err
    assert captured.out.strip() not in captured.err
    (entry,) = read_keys(file).values()
    assert entry.scopes == {Scope.GATEWAY, Scope.TENANTS}


@pytest.mark.parametrize(("text", "hours"), [("30d", 720), ("12h", 12)])
def test_key_expires_when_its_span_is_over(
    text: str, hours: int, tmp_path: Path, capsys: Capture
) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    key = _add(tmp_path / "keys.json", capsys, "--tenant=a", f"--expires={text}")
    expires = read_keys(tmp_path / "keys.json")[key.key_id].expires
    assert expires is not None
    assert before <= expires - timedelta(hours=hours) <= datetime.now(UTC)


def test_key_expires_at_midnight_when_given_a_date(tmp_path: Path, capsys: Capture) -> None:
    key = _add(tmp_path / "keys.json", capsys, "--tenant=a", "--expires=2999-01-31")
    expires = read_keys(tmp_path / "keys.json")[key.key_id].expires
    assert expires == datetime(2999, 1, 31, tzinfo=UTC)


@pytest.mark.parametrize(
    "flag",
    [
        "--tenant=",
        "--tenant=a\nb",
        f"--tenant={'t' * 129}",
        "--scope=all",
        "--expires=0d",
        "--expires=2020-01-31",
        "--expires=2999-02-30",
        "--expires=soon",
        "--note=a\nb",
        f"--note={'n' * 257}",
    ],
)
def test_add_refuses_a_flag_out_of_range(flag: str, tmp_path: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["keys", "add", str(tmp_path / "keys.json"), "--tenant=a", flag])
    error = capsys.readouterr().err
    assert f"argument {flag.partition('=')[0]}: " in error
    assert list(tmp_path.iterdir()) == []


def test_list_has_everything_but_secrets(tmp_path: Path, capsys: Capture) -> None:
    file = str(tmp_path / "keys.json")
    first = _add(tmp_path / "keys.json", capsys, "--tenant=a", "--expires=2999-01-31")
    second = _add(tmp_path / "keys.json", capsys, "--tenant=team b", "--note=x")
    assert main(["keys", "revoke", file, second.key_id]) == 0
    capsys.readouterr()

    assert main(["keys", "list", file]) == 0
    table = capsys.readouterr().out
    assert main(["keys", "list", "--json", file]) == 0
    listed = json.loads(capsys.readouterr().out)

    lines = [line.split() for line in table.splitlines()[1:]]
    assert [line[0] for line in lines] == [first.key_id, second.key_id]
    assert [(entry["id"], entry["state"], entry["tenant"]) for entry in listed] == [
        (first.key_id, "valid", "a"),
        (second.key_id, "revoked", "team b"),
    ]
    assert "2999-01-31T00:00:00Z" in table
    for text in (table, json.dumps(listed)):
        assert all(part not in text for part in (first.secret, first.sha256, second.sha256))


def test_revoke_keeps_the_entry_and_refuses_to_do_it_twice(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "keys.json"
    key, other = (_add(file, capsys, f"--tenant={name}") for name in "ab")
    assert main(["keys", "revoke", str(file), key.key_id]) == 0
    capsys.readouterr()
    entries = read_keys(file)
    assert entries[key.key_id].revoked is not None
    assert entries[other.key_id].revoked is None
    problem = _refusal(capsys, "revoke", str(file), key.key_id)
    assert problem.startswith(f"{key.key_id} was already revoked at ")


def test_command_fails_in_one_line_when_file_unusable(tmp_path: Path, capsys: Capture) -> None:
    file, nowhere = tmp_path / "keys.json", tmp_path / "no" / "keys.json"
    missing = f"{file}: No such file or directory"
    assert _refusal(capsys, "list", str(file)) == missing
    assert _refusal(capsys, "revoke", str(file), "0123456789ab") == missing
    assert _refusal(capsys, "add", str(nowhere), "--tenant=a") == (
        f"{nowhere}: No such file or directory"
    )
    assert "/keys.json: Is a directory" in _refusal_of_folder(file, capsys)
    file.rmdir()
    file.write_text("{}")
    assert "is not a key file" in _refusal(capsys, "add", str(file), "--tenant=a")
    assert file.read_text() == "{}"


def _refusal_of_folder(file: Path, capsys: Capture) -> str:
    file.mkdir()
    return _refusal(capsys, "add", str(file), "--tenant=a")


def test_revoke_names_the_id_when_there_is_no_such_key(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "keys.json"
    _add(file, capsys, "--tenant=a")
    problem = _refusal(capsys, "revoke", str(file), "nobody's")
    assert problem == f'{file}: no key has the id "nobody\'s"'
