"""Escaping of untrusted text for log lines and terminals."""

from __future__ import annotations


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
