"""Check of file names that come from another process."""

from __future__ import annotations

_MAX_NAME_CHARS = 255


def check_file_name(name: str) -> None:
    """Raises ValueError with the reason unless `name` stays in its folder and is printable.

    Allowed: 1 to 255 printable characters, in parts divided by slashes. No part may be empty, "."
    or "..". Backslashes and colons are refused, since they mean something else on other systems.
    """
    if not 0 < len(name) <= _MAX_NAME_CHARS:
        raise ValueError(f"it has {len(name)} characters; allowed: 1 to {_MAX_NAME_CHARS}")
    if not name.isprintable():
        raise ValueError("it has control or other unprintable characters")
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name or ":" in name:
        raise ValueError('it is no relative path; allowed: names, divided by "/"')
