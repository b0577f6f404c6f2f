"""Who is warned of which files with secrets."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from splitserve_client.client_config import ApiKey
from splitserve_rpc.files import is_readable_by_others
from splitserve_rpc.security import read_token
from splitserve_rpc.tls import Tls, TlsFiles
from tests.support.security.cluster import Certificates


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
