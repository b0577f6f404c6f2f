"""Parser for JSON of unknown origin, which may be nested arbitrarily deeply."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def parse_json(
    text: str | bytes,
    *,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:  # noqa: ANN401
    """Returns the result of `json.loads`. Raises ValueError, also for too deep nesting."""
    try:
        return json.loads(  # noqa: TID251  # all other modules call this function
            text, object_pairs_hook=object_pairs_hook, parse_constant=parse_constant
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


# -- Escaping of untrusted text for log lines and terminals ----------------------------------------


def printable(text: str) -> str:
    r"""Returns `text` with all unprintable characters escaped.

    The result is on one line and looks like its content: control characters, line separators,
    direction marks, zero-width characters and lone surrogates become `\n`, `\x1b` or `\u202e`.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


# -- Check of file names that come from another process --------------------------------------------

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
        raise ValueError('it is not a relative path; allowed: names separated by "/"')
