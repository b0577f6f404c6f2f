from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_service.journal.segment_file import (
    JournalUnreadable,
    SegmentFile,
    SegmentReader,
    frame,
)
from splitserve.scheduler.v1 import journal_pb2 as journal


def entries(count: int) -> list[journal.JournalEntry]:
    """Of lengths around those where the length takes one byte more."""
    sizes = [0, 1, 118, 119, 120, 130, 16_380, 16_390]
    return [
        journal.JournalEntry(core=index, schedule=journal.CoreSchedule(batch=b"x" * size))
        for index, size in zip(range(1, count + 1), sizes, strict=False)
    ]


def write(path: Path, written: list[journal.JournalEntry]) -> list[int]:
    """Returns where each ends."""
    file = SegmentFile(path)
    ends = []
    for entry in written:
        file.write(frame(entry))
        ends.append(file.num_bytes)
    file.close()
    return ends


def test_reader_gives_all_entries_when_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    ends = write(path, entries(8))

    reader = SegmentReader(path)

    assert list(reader) == entries(8)
    assert not reader.is_cut
    assert path.stat().st_size == ends[-1]


def test_reader_gives_complete_entries_when_the_file_is_cut_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    ends = write(path, entries(6))
    data = path.read_bytes()

    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        reader = SegmentReader(path)
        num_complete = sum(end <= length for end in ends)
        assert list(reader) == entries(6)[:num_complete]
        assert reader.is_cut == (length not in (0, *ends))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x02\xff\xff", "bytes that are no entry"),
        (b"\xff" * 12, "a length that is no number"),
    ],
)
def test_reader_refuses_file_when_it_is_none_of_ours(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = tmp_path / "journal"
    path.write_bytes(data)

    with pytest.raises(JournalUnreadable, match=message):
        list(SegmentReader(path))


def test_reader_refuses_file_when_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(JournalUnreadable, match="No such file"):
        list(SegmentReader(tmp_path / "journal"))


def test_file_of_an_earlier_process_is_kept_when_another_begins(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, entries(2))
    write(path, entries(1))

    file = SegmentFile(path)

    assert list(SegmentReader(file.previous)) == entries(1)
    assert path.stat().st_size == 0
    file.close()


@pytest.fixture(params=[0o000, 0o022, 0o277])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_files_are_for_their_owner_alone_whatever_the_umask_and_what_was_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"")
    path.chmod(0o644)

    write(path, entries(1))

    assert path.stat().st_mode & 0o777 == 0o600
    assert path.with_name("journal.1").stat().st_mode & 0o777 == 0o600


def test_folder_stays_where_it_is_when_it_is_to_be_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is no regular file"):
        SegmentFile(tmp_path)

    assert tmp_path.is_dir()
