"""An audit log that a test can read."""

from __future__ import annotations

from scheduler_service.audit.audit import AuditEvent


class ListedAudit:
    """Implements `Audit`. `events`: all that were recorded."""

    def __init__(self) -> None:
        self.events: list[AuditEvent] = []

    def record(self, event: AuditEvent) -> None:
        self.events.append(event)

    def close(self) -> None:
        """See Audit."""
