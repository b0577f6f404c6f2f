"""Files that are read whole, watched, replaced, or hold secrets."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler_service.callers import read_key_file, read_tenants
from scheduler_service.callers.tokens import read_token_keys
from splitserve_client import ApiKey
from splitserve_common import (
    FilesUnusable,
    WatchedFiles,
    is_readable_by_others,
    read_bytes,
    read_whole,
    replace_file,
)
from splitserve_rpc import Tls, TlsFiles, read_token
from tests.support.security.cluster import Certificates

READERS: dict[str, Callable[[Path], object]] = {
    "keys": read_key_file,
    "tenants": read_tenants,
    "token keys": read_token_keys,
    "credential": read_bytes,
    "authority": lambda path: Tls(TlsFiles(ca=path)),
    "certificate": lambda path: Tls(TlsFiles(cert=path, key=path)),
}


def test_file_is_read_when_at_the_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_whole(link, 5) == b"12345"
    with pytest.raises(OSError, match="is too large; allowed: 4 bytes"):
        read_whole(link, 4)


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _large_file(folder: Path) -> Path:
    with (folder / "large").open("wb") as file:
        # A sparse file needs no space on the disk.
        file.truncate(2**27)
    return folder / "large"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (_pipe, "pipe: is not a regular file"),
        (lambda _: Path("/dev/zero"), "/dev/zero: is not a regular file"),
        (_large_file, "large: is too large; allowed: "),
    ],
)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_file_is_refused_when_it_may_not_end(
    tmp_path: Path,
    read: Callable[[Path], object],
    make: Callable[[Path], Path],
    problem: str,
) -> None:
    with pytest.raises(FilesUnusable, match=problem):
        read(make(tmp_path))


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


def test_value_is_kept_when_the_file_is_unusable(
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


def test_file_is_read_again_when_restored_after_an_error(path: Path) -> None:
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


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous_umask")
@pytest.mark.parametrize(
    ("before", "after"), [(None, 0o600), (0o644, 0o640), (0o640, 0o640), (0o400, 0o600)]
)
def test_secret_is_read_by_nobody_new_when_it_is_replaced(
    tmp_path: Path, before: int | None, after: int
) -> None:
    path = tmp_path / "secret"
    if before is not None:
        path.write_text("old")
        path.chmod(before)
    replace_file(path, b"new")
    assert (path.read_bytes(), _mode(path)) == (b"new", after)
    assert list(tmp_path.iterdir()) == [path]


def test_public_file_is_readable_by_all_with_any_umask(tmp_path: Path) -> None:
    path, before = tmp_path / "certificate", os.umask(0o077)
    try:
        replace_file(path, b"new", is_secret=False)
    finally:
        os.umask(before)
    assert _mode(path) == 0o644


def test_replaced_file_stays_readable_for_its_reader(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    (tmp_path / ".secret.new").write_bytes(b"of somebody who was interrupted")
    with path.open("rb") as reader:
        replace_file(path, b"new")
        assert (reader.read(), path.read_bytes()) == (b"old", b"new")


def _token(folder: Path) -> Path:
    path = folder / "token"
    path.write_text("t" * 32)
    return path


def _certificates(folder: Path) -> Path:
    Certificates.make(folder)
    return folder / "scheduler.key"


def _tls(key: Path) -> object:
    return Tls(TlsFiles(key.with_suffix(".crt"), key))


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (_token, read_token),
        (_token, lambda path: ApiKey(None, path)),
        (_certificates, _tls),
    ],
    ids=["token", "api key", "private key"],
)
def test_file_that_others_may_read_is_warned_of_once(
    make: Callable[[Path], Path],
    read: Callable[[Path], object],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warned = []
    for mode in (0o600, 0o644):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        path = make(folder)
        path.chmod(mode)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert read(path)
        warned.append(f"secret_file_is_readable path={path} mode={mode:04o}")
    assert caplog.messages == warned[1:]


@pytest.mark.parametrize(
    ("mode", "owner", "is_readable"),
    [
        (0o600, 1000, False),
        (0o400, 0, False),
        (0o640, 0, False),
        (0o440, 0, False),
        (0o640, 1000, True),
        (0o660, 0, True),
        (0o644, 0, True),
        (0o604, 1000, True),
        (0o602, 1000, True),
    ],
)
def test_group_may_read_what_root_owns(mode: int, owner: int, is_readable: bool) -> None:
    status = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, 0, 1, 0, 0, 0))
    assert is_readable_by_others(status) is is_readable
