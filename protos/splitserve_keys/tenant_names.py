"""What a tenant may be called."""

from __future__ import annotations

MAX_TENANT_CHARS = 128
TENANT_NAMES = f"a text of 1 to {MAX_TENANT_CHARS} printable characters"


def is_tenant_name(name: object) -> bool:
    """Whether `name` is one of `TENANT_NAMES`; logs say it, so it has no line breaks."""
    return isinstance(name, str) and 0 < len(name) <= MAX_TENANT_CHARS and name.isprintable()
