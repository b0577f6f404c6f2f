"""The files of a journal: length-delimited entries, a current segment and the one before."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from splitserve.scheduler.v1 import journal_pb2 as journal
from splitserve_rpc.private_files import make_private, open_private

_BUFFER_BYTES = 256 * 1024
_CONTINUES, _PAYLOAD_BITS = 0x80, 7


class SegmentFile:
    """Writes `path`. What was there before becomes `previous`, replacing it.

    Writes are buffered, and nothing is forced to the disk. Every method may raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.previous = path.with_name(path.name + ".1")
        # Of the current segment, buffered ones included.
        self.num_bytes = 0
        self._file = self._begin()

    def write(self, record: bytes) -> None:
        """Appends a record."""
        self._file.write(record)
        self.num_bytes += len(record)

    def flush(self) -> None:
        """Gives everything to the system."""
        self._file.flush()

    def rotate(self) -> None:
        """Begins a new segment."""
        self._file.close()
        self._file = self._begin()
        self.num_bytes = 0

    def close(self) -> None:
        """Ends the writing."""
        self._file.close()

    def _begin(self) -> BinaryIO:
        if self._path.exists():
            if not self._path.is_file():
                raise OSError(errno.EINVAL, "it is no regular file")
            make_private(self._path)
            self._path.replace(self.previous)
        # Prompts are in it.
        return open(self._path, "wb", _BUFFER_BYTES, opener=open_private)


def frame(entry: journal.JournalEntry) -> bytes:
    """The record of an entry."""
    message = entry.SerializeToString()
    length, prefix = len(message), bytearray()
    while length >= _CONTINUES:
        prefix.append(length & (_CONTINUES - 1) | _CONTINUES)
        length >>= _PAYLOAD_BITS
    prefix.append(length)
    return bytes(prefix) + message


class JournalUnreadable(Exception):
    """The file is not a journal, or not one that this software can read."""


class SegmentReader:
    """The entries of a file. `is_cut`: afterwards, whether it ends in the middle of one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_cut = False

    def __iter__(self) -> Iterator[journal.JournalEntry]:
        """Raises JournalUnreadable."""
        try:
            with self._path.open("rb") as file:
                num_left = os.fstat(file.fileno()).st_size
                while num_left > 0:
                    length, num_read = _read_length(file)
                    num_left -= num_read + length
                    if num_read == 0 or num_left < 0:
                        self.is_cut = True
                        return
                    yield journal.JournalEntry.FromString(file.read(length))
        except OSError as error:
            raise JournalUnreadable(error.strerror or str(error)) from error
        except DecodeError as error:
            raise JournalUnreadable("it has bytes that are no entry") from error


def _read_length(file: BinaryIO) -> tuple[int, int]:
    """A varint, and the bytes it took; 0 of them if it is cut."""
    length = 0
    for num_read in range(1, 11):
        byte = file.read(1)
        if not byte:
            return 0, 0
        length |= (byte[0] & (_CONTINUES - 1)) << (num_read - 1) * _PAYLOAD_BITS
        if byte[0] < _CONTINUES:
            return length, num_read
    raise JournalUnreadable("it has a length that is no number")
