"""Callers and their credentials: in memory, in a file of keys, and as metadata of calls."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from scheduler_service.audit import AuditEvent
from scheduler_service.callers import NO_LIMITS, Caller, Scope, TenantLimits
from splitserve_cli.main import main
from splitserve_contract import DomainError
from splitserve_keys import ApiKey, KeyEntry, Keys, change_keys
from splitserve_rpc import NOBODY, Access, ClusterIdentity, Metadata


def bearer(credential: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata of a call, or headers of a request (`dict`); none without a credential."""
    return (("authorization", f"Bearer {credential}"),) if credential else ()


class LocalCall:
    """Stands for a grpc.aio.ServicerContext, which cannot be made. `credential`: empty for none."""

    def __init__(self, credential: str = "") -> None:
        self._credential = credential

    def peer(self) -> str:
        """Address of the caller."""
        return "test"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of the call."""
        return bearer(self._credential)


class OneKey(Access):
    """Access with `key` (None: without one). `calls`: method and credential of each call."""

    def __init__(self, key: str | None = None, identity: ClusterIdentity = NOBODY) -> None:
        super().__init__(identity)
        self.key = key
        self.calls: list[tuple[str, str]] = []

    def check_metadata(self, method: str, metadata: Metadata) -> None:
        brought = str(dict(metadata).get("authorization", ""))
        self.calls.append((method.rpartition("/")[2], brought))
        if self.key is not None and brought != f"Bearer {self.key}":
            raise DomainError("CALLER_UNKNOWN", "the credential is not valid")
        super().check_metadata(method, metadata)


class KeyRing:
    """Implements `Callers`. `limits_of`: what tenants may have, where that is not everything."""

    knows_callers = True

    def __init__(self) -> None:
        self._callers: dict[str, Caller] = {}
        self.limits_of: dict[str, TenantLimits] = {}

    def add(self, tenant: str, *scopes: Scope) -> str:
        """Adds a credential; its default scope is to generate."""
        name = f"key{len(self._callers)}"
        credential = f"secret-of-{name}"
        self._callers[credential] = Caller(name, tenant, frozenset(scopes or {Scope.GENERATE}))
        return credential

    def revoke(self, credential: str) -> None:
        """Revokes a credential."""
        del self._callers[credential]

    def identify(self, credential: str) -> Caller:
        try:
            return self._callers[credential]
        except KeyError:
            raise DomainError("CALLER_UNKNOWN", "no valid credential") from None

    def limits(self, tenant: str) -> TenantLimits:
        return self.limits_of.get(tenant, NO_LIMITS)


class KeyFile:
    """Keys in `directory`, with a file of tenants beside them."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "keys.json"
        self.tenants = directory / "tenants.toml"

    def add(self, tenant: str, *flags: str) -> str:
        """Adds a key."""
        return _run("add", str(self.path), "--tenant", tenant, *flags).strip()

    def revoke(self, key: str) -> None:
        """Revokes a key in the file."""
        _run("revoke", str(self.path), id_of(key))

    def expire(self, key: str) -> None:
        """Changes a key to one that expired yesterday."""
        key_id, now = id_of(key), datetime.now(UTC)

        def change(keys: Keys) -> dict[str, KeyEntry]:
            entry = keys[key_id]
            created, expires = now - timedelta(days=2), now - timedelta(days=1)
            return {**keys, key_id: replace(entry, created=created, expires=expires)}

        change_keys(self.path, change)


def id_of(key: str) -> str:
    """Id of a key, by which the file names it."""
    parsed = ApiKey.parse(key)
    assert parsed is not None
    return parsed.key_id


def _run(*arguments: str) -> str:
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(io.StringIO()):
        assert main(["keys", *arguments]) == 0
    return output.getvalue()


class ListedAudit:
    """Implements `Audit`. `events`: all that were recorded."""

    def __init__(self) -> None:
        self.events: list[AuditEvent] = []

    def record(self, event: AuditEvent) -> None:
        self.events.append(event)

    def close(self) -> None:
        """See Audit."""
