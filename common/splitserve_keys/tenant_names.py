"""Rules for the names of tenants."""

from __future__ import annotations

MAX_TENANT_CHARS = 128
TENANT_NAMES = f"a text of 1 to {MAX_TENANT_CHARS} printable characters"


def is_tenant_name(name: object) -> bool:
    """Returns whether `name` is a valid tenant name: printable, since logs contain names."""
    return isinstance(name, str) and 0 < len(name) <= MAX_TENANT_CHARS and name.isprintable()
