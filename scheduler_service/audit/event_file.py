"""A file of JSON lines that others may move away."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from splitserve_rpc.private_files import open_private

_MAX_TEXT_CHARS = 256


class EventFile:
    """Appends to `path`, which is made anew where it is gone. Its methods may raise OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()
        self._is_torn = False

    def write(self, fields: Mapping[str, object]) -> None:
        """Appends a line."""
        if not self._is_current():
            file = self._open()
            self._file.close()
            self._file = file
        # What a full disk took a part of does not spoil what follows.
        line = b"\n" * self._is_torn + _line(fields)
        num_bytes = self._file.write(line) or 0
        self._is_torn = num_bytes != len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, "only a part was written")

    def close(self) -> None:
        """Ends the writing."""
        self._file.close()

    def _open(self) -> FileIO:
        # Unbuffered: a line is there as a whole, for whoever follows the file.
        return open(self._path, "ab", 0, opener=open_private)

    def _is_current(self) -> bool:
        """Whether what is open is what is found at the path."""
        ours = os.fstat(self._file.fileno())
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _line(fields: Mapping[str, object]) -> bytes:
    shown = {
        name: value[:_MAX_TEXT_CHARS] if isinstance(value, str) else value
        for name, value in fields.items()
    }
    # JSON escapes all other controls, and whatever is not ASCII.
    return json.dumps(shown).replace("\x7f", r"\u007f").encode() + b"\n"
