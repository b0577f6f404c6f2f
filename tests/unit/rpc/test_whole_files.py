"""What is read whole: nothing that has no end, or for which somebody has to be waited."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_service.callers.authenticator import read_key_file
from scheduler_service.callers.tenants_file import read_tenants
from scheduler_service.callers.tokens import read_token_keys
from splitserve_rpc.files import FilesUnusable, read_bytes, read_whole
from splitserve_rpc.tls import Tls, TlsFiles

READERS: dict[str, Callable[[Path], object]] = {
    "keys": read_key_file,
    "tenants": read_tenants,
    "token keys": read_token_keys,
    "credential": read_bytes,
    "authority": lambda path: Tls(TlsFiles(ca=path)),
    "certificate": lambda path: Tls(TlsFiles(cert=path, key=path)),
}


def test_file_is_read_when_it_is_as_large_as_may_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_whole(link, 5) == b"12345"
    with pytest.raises(OSError, match="is too large; allowed: 4 bytes"):
        read_whole(link, 4)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_pipe_that_nobody_writes_to_is_refused_at_once(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(FilesUnusable, match="pipe: is not a regular file"):
        read(path)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_device_without_end_is_refused(read: Callable[[Path], object]) -> None:
    with pytest.raises(FilesUnusable, match="/dev/zero: is not a regular file"):
        read(Path("/dev/zero"))


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_file_that_is_too_large_is_refused(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        # It takes no room on the disk.
        file.truncate(2**27)
    with pytest.raises(FilesUnusable, match="large: is too large; allowed: "):
        read(path)
