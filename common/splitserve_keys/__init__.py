"""API keys, and the file of their digests, for the command `splitserve keys` and schedulers."""

from splitserve_keys.key_file import (
    NOTES,
    PREFIX,
    TENANT_NAMES,
    ApiKey,
    KeyEntry,
    KeyFileUnusable,
    Keys,
    Scope,
    change_keys,
    format_keys,
    is_key_id,
    is_note,
    is_tenant_name,
    parse_keys,
    read_keys,
    time_text,
)

__all__ = [
    "NOTES",
    "PREFIX",
    "TENANT_NAMES",
    "ApiKey",
    "KeyEntry",
    "KeyFileUnusable",
    "Keys",
    "Scope",
    "change_keys",
    "format_keys",
    "is_key_id",
    "is_note",
    "is_tenant_name",
    "parse_keys",
    "read_keys",
    "time_text",
]
