from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from executor_service.device.memory import available_host_bytes, format_bytes, release_file_pages


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the container's files may be; the system has 5 MB."""
    for name in ("limit", "used", "statistics"):
        path = tmp_path / name
        monkeypatch.setattr(f"executor_service.device.memory._CGROUP_{name.upper()}", path)
    memory = SimpleNamespace(available=5_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return tmp_path


def test_available_host_bytes_is_what_the_system_has_when_there_is_no_container(
    cgroup: Path,
) -> None:
    assert available_host_bytes() == 5_000_000


@pytest.mark.parametrize(
    ("limit", "statistics", "available"),
    [
        ("3000000\n", "", 2_000_000),
        ("max\n", "", 5_000_000),
        ("9000000\n", "", 5_000_000),
        ("500000\n", "", 0),
        # What the page cache holds makes room.
        ("3000000\n", "anon 5\nactive_file 200000\ninactive_file 400000\n", 2_600_000),
        ("3000000\n", "active_file 1200000\ninactive_file 0\n", 3_000_000),
    ],
)
def test_available_host_bytes_obeys_the_container_when_it_is_limited(
    cgroup: Path, limit: str, statistics: str, available: int
) -> None:
    (cgroup / "limit").write_text(limit)
    (cgroup / "used").write_text("1000000\n")
    (cgroup / "statistics").write_text(statistics)
    assert available_host_bytes() == available


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (5 * 2**20, "5.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (-(2**30), "-1.00 GiB"),
    ],
)
def test_format_bytes_takes_the_largest_unit_when_it_is_reached(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def _resident_kib(path: Path) -> int:
    """Of the mapping of `path` in this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            return next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    raise AssertionError(f"{path} is not mapped")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="there is no /proc")
@pytest.mark.parametrize("is_written", [False, True])
def test_release_file_pages_gives_back_weights_that_were_only_read(
    tmp_path: Path, is_written: bool
) -> None:
    path = tmp_path / "with a space.safetensors"
    content = np.arange(2**20, dtype=np.int32)
    content.tofile(path)
    mapped = np.memmap(path, np.int32, mode="c")
    if is_written:
        mapped[7] = -1
    assert int(mapped[8:].sum()) == int(content[8:].sum())
    assert _resident_kib(path) == 4096

    release_file_pages()

    assert _resident_kib(path) == (4096 if is_written else 0)
    assert mapped[7] == (-1 if is_written else 7)
    assert int(mapped[8:].sum()) == int(content[8:].sum())
