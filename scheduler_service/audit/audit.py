"""Where events of the audit log go: `Audit`."""

from __future__ import annotations

from typing import Protocol

from scheduler_service.audit.events import AuditEvent


class Audit(Protocol):
    """Takes events. It waits for nobody, and may be called in any thread."""

    def record(self, event: AuditEvent) -> None:
        """One more."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


class NoAudit:
    """Nobody has asked for a log. Implements `Audit`."""

    def record(self, event: AuditEvent) -> None:
        pass

    def close(self) -> None:
        pass
