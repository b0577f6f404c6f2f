"""Files of keys and tenants, as operators make them."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from splitserve_cli.main import main
from splitserve_keys.key_file import ApiKey, KeyEntry, Keys, change_keys


class KeyFile:
    """Keys in `directory`, with a file of tenants beside them."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "keys.json"
        self.tenants = directory / "tenants.toml"

    def add(self, tenant: str, *flags: str) -> str:
        """A new key."""
        return _run("add", str(self.path), "--tenant", tenant, *flags).strip()

    def revoke(self, key: str) -> None:
        """It is nobody's once the file has been read again."""
        _run("revoke", str(self.path), id_of(key))

    def expire(self, key: str) -> None:
        """It was valid for a day, the day before yesterday."""
        key_id, now = id_of(key), datetime.now(UTC)

        def change(keys: Keys) -> dict[str, KeyEntry]:
            entry = keys[key_id]
            created, expires = now - timedelta(days=2), now - timedelta(days=1)
            return {**keys, key_id: replace(entry, created=created, expires=expires)}

        change_keys(self.path, change)


def id_of(key: str) -> str:
    """By which it is known in the file, and revoked."""
    parsed = ApiKey.parse(key)
    assert parsed is not None
    return parsed.key_id


def _run(*arguments: str) -> str:
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(io.StringIO()):
        assert main(["keys", *arguments]) == 0
    return output.getvalue()
