from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve_rpc.files import replace_file


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


def test_what_is_no_secret_is_for_all_to_read_whatever_the_umask_is(tmp_path: Path) -> None:
    path, before = tmp_path / "certificate", os.umask(0o077)
    try:
        replace_file(path, b"new", is_secret=False)
    finally:
        os.umask(before)
    assert _mode(path) == 0o644


def test_reader_of_the_old_file_still_has_it_when_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    (tmp_path / ".secret.new").write_bytes(b"of somebody who was interrupted")
    with path.open("rb") as reader:
        replace_file(path, b"new")
        assert (reader.read(), path.read_bytes()) == (b"old", b"new")
