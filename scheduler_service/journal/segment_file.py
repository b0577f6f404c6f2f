"""Files of a journal: records with checksums, in a current segment and the previous one.

A record is a frame of 12 bytes and the bytes of an entry. The frame has three little-endian u32:
the length of the entry, its CRC-32 continued from that of the record before (0 at first), and the
CRC-32 of these eight bytes. A changed, lost or doubled record fails its check, and a changed length
cannot look like the end of a file whose writer was killed.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from google.protobuf.message import DecodeError

from splitserve.scheduler.v1 import journal_pb2 as journal
from splitserve_common import make_private, open_private

_BUFFER_BYTES = 256 * 1024
_CHECKED = struct.Struct("<II")
_FRAME = struct.Struct("<III")
FRAME_BYTES = _FRAME.size


class SegmentFile:
    """Writes segments to `path`. The file that was there before replaces `previous`.

    Writes are buffered, and nothing is forced to the disk. Every method may raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.previous = path.with_name(path.name + ".1")
        # Size of the current segment, including buffered bytes.
        self.num_bytes = 0
        self._checksum = 0
        self._file = self._begin()

    def write(self, entry: bytes) -> None:
        """Appends the record of a serialized JournalEntry: its bytes and FRAME_BYTES."""
        self._checksum = crc32(entry, self._checksum)
        checked = _CHECKED.pack(len(entry), self._checksum)
        self._file.write(_FRAME.pack(len(entry), self._checksum, crc32(checked)))
        self._file.write(entry)
        self.num_bytes += FRAME_BYTES + len(entry)

    def flush(self) -> None:
        """Passes all buffered bytes to the operating system."""
        self._file.flush()

    def rotate(self) -> None:
        """Ends the current segment and begins a new one."""
        self._file.close()
        self._file = self._begin()
        self.num_bytes = 0
        self._checksum = 0

    def close(self) -> None:
        """Flushes and closes the file."""
        self._file.close()

    def _begin(self) -> BinaryIO:
        if self._path.exists():
            if not self._path.is_file():
                raise OSError(errno.EINVAL, "not a regular file")
            make_private(self._path)
            self._path.replace(self.previous)
        # The file contains prompts, so only its owner may read it.
        return open(self._path, "wb", _BUFFER_BYTES, opener=open_private)


class JournalUnreadable(Exception):
    """Error: the file is not a journal, is damaged, or is in a format of another version."""


class SegmentReader:
    """Reads the entries of a segment.

    `is_cut`: after reading, whether the last record is incomplete.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_cut = False

    def __iter__(self) -> Iterator[journal.JournalEntry]:
        """Yields the entries in order. Raises JournalUnreadable at the first damaged record."""
        try:
            with self._path.open("rb") as file:
                yield from self._read(file)
        except OSError as error:
            raise JournalUnreadable(error.strerror or str(error)) from error

    def _read(self, file: BinaryIO) -> Iterator[journal.JournalEntry]:
        size = os.fstat(file.fileno()).st_size
        checksum, number, begins_at = 0, 0, 0
        while begins_at < size:
            frame = file.read(FRAME_BYTES)
            self.is_cut = len(frame) < FRAME_BYTES
            if self.is_cut:
                return
            length, expected, frame_checksum = _FRAME.unpack(frame)
            if crc32(frame[: _CHECKED.size]) != frame_checksum:
                if number == 0:
                    raise JournalUnreadable("not a journal of this format")
                raise JournalUnreadable(_damaged(number, begins_at, "its length or checksum"))
            # The length can be trusted, because the checksum of the frame covers it.
            data = file.read(min(length, size - begins_at))
            self.is_cut = len(data) < length
            if self.is_cut:
                return
            checksum = crc32(data, checksum)
            if checksum != expected:
                raise JournalUnreadable(_damaged(number, begins_at, "its bytes"))
            yield _decode(data, number)
            begins_at += FRAME_BYTES + length
            number += 1


def _damaged(number: int, begins_at: int, what: str) -> str:
    return (
        f"record {number} (from byte {begins_at}) is damaged: {what} changed after writing, "
        f"or a record before it is missing"
    )


def _decode(data: bytes, number: int) -> journal.JournalEntry:
    """Returns the entry of record `number`.

    Raises JournalUnreadable for fields of another version.
    """
    try:
        entry = journal.JournalEntry.FromString(data)
    except DecodeError as error:
        raise JournalUnreadable(f"record {number} is not a journal entry") from error
    entry.DiscardUnknownFields()
    if entry.ByteSize() != len(data):
        raise JournalUnreadable(
            f"record {number} has fields that this software does not know: another version wrote it"
        )
    return entry
