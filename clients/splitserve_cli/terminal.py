"""Text of a model on a terminal: a model may have been talked into speaking to that."""

from __future__ import annotations

import re
from typing import Protocol, TextIO

from splitserve_rpc.printable import printable

# All control characters, also those of 8 bits, but the tab and the end of a line. Others that move
# nothing but text, as marks of direction do, belong to languages.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TextFile(Protocol):
    """Where text goes."""

    def write(self, text: str, /) -> object:
        """Writes it."""

    def flush(self) -> object:
        """Lets it be seen."""


class _Terminal:
    """Escapes control characters, so that they are seen and do nothing."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str, /) -> None:
        self._file.write(_CONTROLS.sub(lambda found: printable(found[0]), text))

    def flush(self) -> None:
        self._file.flush()


def as_seen_by_people(file: TextIO) -> TextFile:
    """`file` as it is, unless it is a terminal: then control characters are written escaped."""
    return _Terminal(file) if file.isatty() else file
