"""docs/security.md has every event of the audit log with its fields, and no other."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

from scheduler_service.audit.audit import AuditEvent
from scheduler_service.audit.file_audit import event_name

ROOT = Path(__file__).parents[4]


def test_security_doc_lists_the_events_and_their_fields() -> None:
    document = (ROOT / "docs" / "security.md").read_text()
    table = document.partition("| event | when | fields")[2].partition("\n\n")[0]
    listed = dict[str, set[str]]()
    for row in table.splitlines()[2:]:
        events, _, named = row.strip("| ").split(" | ")
        for event in re.findall(r"`(\w+)`", events):
            listed[event] = set(re.findall(r"`(\w+)`", named))

    kinds = {event_name(kind): kind for kind in get_args(AuditEvent)}
    assert listed.keys() == kinds.keys()
    for name, kind in kinds.items():
        missing = {field.name for field in fields(kind)} - listed[name]
        assert not missing, name
