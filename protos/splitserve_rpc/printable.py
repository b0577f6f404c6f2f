"""Texts of others, made fit for a line of a log or a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""`text` with every character escaped that moves a cursor, ends a line or turns it around.

    What is left is on one line and is what it looks like: controls, separators of lines, marks of
    direction, what has no width and lone surrogates read as `\n`, `\x1b` or `\u202e`.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
