"""Tests segments of a journal: whole, cut, damaged or of somebody else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_service.journal import FRAME_BYTES, JournalUnreadable, SegmentFile, SegmentReader
from splitserve.scheduler.v1 import journal_pb2 as journal


def entries(count: int) -> list[journal.JournalEntry]:
    """Of lengths around those where the length takes one byte more."""
    sizes = [0, 1, 118, 119, 120, 130, 16_380, 16_390]
    return [
        journal.JournalEntry(now_ns=index, step_completed=journal.StepCompleted(result=b"x" * size))
        for index, size in zip(range(1, count + 1), sizes, strict=False)
    ]


def write(path: Path, written: list[journal.JournalEntry]) -> list[int]:
    """Returns where each ends."""
    file = SegmentFile(path)
    ends = []
    for entry in written:
        file.write(entry.SerializeToString())
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


def test_reader_names_the_record_with_a_flipped_bit(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written = entries(6)
    begins = [0, *write(path, written)]
    data = path.read_bytes()
    for position in range(len(data)):
        if begins[-3] <= position < begins[-2] - 40:
            continue  # a long record: its ends are enough
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        number = max(index for index, begin in enumerate(begins) if begin <= position)

        read: list[journal.JournalEntry] = []
        with pytest.raises(JournalUnreadable) as raised:
            read.extend(SegmentReader(path))

        assert read == written[:number]
        in_first_frame = position < FRAME_BYTES
        named = "not a journal" if in_first_frame else f"record {number} (from byte"
        assert named in str(raised.value) or (number == 0 and "record 0" in str(raised.value))


def test_reader_refuses_missing_or_doubled_records(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    ends = write(path, entries(4))
    data = path.read_bytes()
    without_second = data[: ends[0]] + data[ends[1] :]
    second_doubled = data[: ends[1]] + data[ends[0] :]

    for number, changed in ((1, without_second), (2, second_doubled)):
        path.write_bytes(changed)
        with pytest.raises(JournalUnreadable, match=f"record {number} .* a record before it"):
            list(SegmentReader(path))


@pytest.mark.parametrize("data", [b"\x02\xff" * 20, b"# A text of somebody else\n", bytes(64)])
def test_reader_refuses_file_when_it_is_none_of_ours(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(data)

    with pytest.raises(JournalUnreadable, match="not a journal of this format"):
        list(SegmentReader(path))


def test_reader_refuses_entry_when_another_version_has_added_a_field(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    field_of_tomorrow = b"\xa2\x06\x01x"  # number 100, one byte
    file = SegmentFile(path)
    file.write(entries(1)[0].SerializeToString() + field_of_tomorrow)
    file.close()

    with pytest.raises(JournalUnreadable, match="fields that this software does not know"):
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
def test_files_are_for_their_owner_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"")
    path.chmod(0o644)

    write(path, entries(1))

    assert path.stat().st_mode & 0o777 == 0o600
    assert path.with_name("journal.1").stat().st_mode & 0o777 == 0o600


def test_folder_is_not_replaced_by_a_journal(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        SegmentFile(tmp_path)

    assert tmp_path.is_dir()
