"""Files of keys and tenants, as operators make them."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from splitserve_cli.main import main


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
        key_id = key.removeprefix("sk-ss-").partition("-")[0]
        _run("revoke", str(self.path), key_id)


def _run(*arguments: str) -> str:
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(io.StringIO()):
        assert main(["keys", *arguments]) == 0
    return output.getvalue()
