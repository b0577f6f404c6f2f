"""A watched file: read again when it changes, kept while it cannot be used."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from splitserve_rpc.files import FilesUnusable, WatchedFiles


def _read(path: Path) -> int:
    try:
        return int(path.read_text())
    except ValueError as error:
        raise FilesUnusable(f"{path}: is no number") from error


def _watched(path: Path) -> WatchedFiles[int]:
    return WatchedFiles("some_files", [path], lambda: _read(path))


def _write(path: Path, text: str, number: int) -> None:
    """`number`: how often it was written, as its time says."""
    path.write_text(text)
    os.utime(path, ns=(number, number))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "number"
    _write(path, "1", 1)
    return path


def test_value_is_the_new_one_when_the_file_has_changed(path: Path) -> None:
    watched = _watched(path)
    assert (watched.refresh(), watched.value) == (False, 1)
    _write(path, "2", 2)
    assert watched.value == 1
    assert (watched.refresh(), watched.value) == (True, 2)
    assert watched.refresh() is False


def test_value_is_the_new_one_when_somebody_looks_at_it(path: Path) -> None:
    watched = _watched(path)
    _write(path, "2", 2)
    assert watched.current() == 2
    assert watched.refresh() is False


def test_nothing_is_new_when_the_file_says_what_it_said(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = _watched(path)
    with caplog.at_level(logging.INFO):
        _write(path, "1", 2)
        assert watched.refresh() is False
        assert caplog.messages == []
        _write(path, "2", 3)
        assert watched.refresh() is True
    assert caplog.messages == [f"some_files_reloaded paths={path}"]


def test_value_stays_and_one_line_is_logged_when_the_file_cannot_be_used(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = _watched(path)
    with caplog.at_level(logging.WARNING):
        _write(path, "x", 2)
        assert [watched.refresh() for _ in range(3)] == [False] * 3
        path.unlink()
        assert [watched.refresh() for _ in range(3)] == [False] * 3
    assert watched.value == 1
    assert caplog.messages == [
        f"some_files_unusable problem='{path}: is no number'",
        f"some_files_unusable problem='{path}: No such file or directory'",
    ]


def test_value_is_the_new_one_when_the_file_is_mended(path: Path) -> None:
    watched = _watched(path)
    _write(path, "x", 2)
    watched.refresh()
    _write(path, "3", 3)
    assert (watched.refresh(), watched.value) == (True, 3)


def test_file_is_read_again_when_it_was_bad_and_comes_back_as_it_was(path: Path) -> None:
    watched = _watched(path)
    _write(path, "x", 2)
    watched.refresh()
    path.unlink()
    _write(path, "1", 1)
    watched.refresh()
    assert watched.value == 1
    _write(path, "x", 2)
    assert watched.refresh() is False


def test_file_is_refused_when_it_cannot_be_used_at_first(path: Path, tmp_path: Path) -> None:
    _write(path, "x", 1)
    with pytest.raises(FilesUnusable, match="is no number"):
        _watched(path)
    with pytest.raises(FilesUnusable, match="none: No such file or directory"):
        _watched(tmp_path / "none")
