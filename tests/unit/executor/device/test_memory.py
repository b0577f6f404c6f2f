"""Memory of host and device: what is available, reserved and used at most."""

from __future__ import annotations

import logging
import mmap
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from executor_service.device import (
    CudaPeakMeter,
    HostPeakMeter,
    HostReservations,
    available_host_bytes,
    choose_device,
    format_bytes,
    release_file_pages,
)
from executor_service.errors import BackendUnavailable


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the container's files may be; the system has 5 MB."""
    for name in ("limit", "used", "statistics"):
        path = tmp_path / name
        monkeypatch.setattr(f"executor_service.device.memory._CGROUP_{name.upper()}", path)
    memory = SimpleNamespace(available=5_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return tmp_path


def test_available_host_bytes_is_that_of_the_system_without_container(
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


# Larger than what a test process can come to use meanwhile by orders of magnitude.
GIB = 2**30
RESERVE = """
import sys
from pathlib import Path
from executor_service.device import HostReservations
reservations = HostReservations(Path(sys.argv[1]))
with reservations.planning():
    reservations.reserve(int(sys.argv[2]))
print("reserved", flush=True)
sys.stdin.read()
"""


def _share(directory: Path, available: int, num_sharing: int = 1, weights: int = 0) -> int:
    reservations = HostReservations(directory, num_sharing)
    with reservations.planning():
        return reservations.share_of(available, weights)


def test_share_of_is_all_there_is_when_nobody_else_reserved(tmp_path: Path) -> None:
    assert _share(tmp_path, 100 * GIB) == 100 * GIB
    assert HostReservations().share_of(100 * GIB, 0) == 100 * GIB


def test_share_of_excludes_reservations_of_live_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RESERVE, str(tmp_path), str(30 * GIB)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"reserved\n"
        left = _share(tmp_path, 100 * GIB)
        other.kill()
    # Little of it is touched, if the process grew a bit since.
    assert 70 * GIB <= left < 71 * GIB
    assert _share(tmp_path, 100 * GIB) == 100 * GIB
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_share_of_divides_what_there_is_when_executors_start_together(tmp_path: Path) -> None:
    kept, total = [], 0
    for _ in range(4):
        reservations = HostReservations(tmp_path, 4)
        with reservations.planning():
            # Each has its weights already, and those that come need as much.
            share = reservations.share_of(20 * GIB, 1 * GIB)
            kept.append(reservations.reserve(share))
        total += share
    assert 16 * GIB <= total <= 20 * GIB + GIB // 10
    assert _share(tmp_path, 20 * GIB) <= 20 * GIB - total + GIB // 10
    for release in kept:
        release()
    assert _share(tmp_path, 20 * GIB) == 20 * GIB


def test_share_of_is_nothing_when_others_reserved_all(tmp_path: Path) -> None:
    reservations = HostReservations(tmp_path)
    release = reservations.reserve(90 * GIB)
    assert _share(tmp_path, 80 * GIB) == 0
    release()


@pytest.mark.parametrize("kind", ["writable by others", "a file", "a link"])
def test_reservations_are_not_shared_when_the_directory_could_be_anybodys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    directory = tmp_path / "shared"
    if kind == "a file":
        directory.touch()
    elif kind == "a link":
        directory.symlink_to(tmp_path)
    else:
        directory.mkdir()
        directory.chmod(0o777)
    with HostReservations(directory).planning():
        pass
    (record,) = caplog.records
    assert (record.levelno, record.getMessage().split()[0]) == (
        logging.WARNING,
        "reservations_not_shared",
    )


def test_others_are_read_when_a_file_among_them_is_no_reservation(tmp_path: Path) -> None:
    (tmp_path / "x.reservation").write_text("nonsense")
    release = HostReservations(tmp_path).reserve(10 * GIB)
    assert _share(tmp_path, 100 * GIB) < 91 * GIB
    release()


SIZE = 64 * 2**20
# Of what else the process does meanwhile, and of how the system counts.
SLACK = 16 * 2**20


def _write(num_bytes: int) -> np.ndarray:
    return np.ones(num_bytes, np.uint8)


def test_peak_bytes_is_the_highest_when_memory_is_freed_again() -> None:
    def work() -> None:
        for size in (SIZE // 2, SIZE, SIZE // 4):
            _write(size)

    assert SIZE - SLACK < HostPeakMeter().peak_bytes(work) < SIZE + SLACK


def test_peak_bytes_counts_what_is_kept_when_it_is() -> None:
    kept: list[np.ndarray] = []
    peak = HostPeakMeter().peak_bytes(lambda: kept.append(_write(SIZE)))
    assert SIZE - SLACK < peak < SIZE + SLACK


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_peak_bytes_forgets_an_earlier_peak_when_the_system_can() -> None:
    _write(4 * SIZE)
    assert HostPeakMeter().peak_bytes(lambda: None) < SLACK


def test_peak_bytes_is_an_upper_bound_when_peaks_cannot_be_reset(
    tmp_path: Path,
) -> None:
    meter = HostPeakMeter(status=tmp_path / "none", clear_refs=tmp_path / "none" / "none")
    _write(2 * SIZE)
    assert meter.peak_bytes(lambda: None) > SIZE


def test_peak_bytes_leaves_out_mapped_files_when_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(SIZE))
    maps: list[mmap.mmap] = []

    def work() -> None:
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        assert not np.frombuffer(maps[0], np.uint8)[:: mmap.PAGESIZE].any()

    assert HostPeakMeter().peak_bytes(work) < SLACK


def test_peak_bytes_passes_on_what_the_work_raises() -> None:
    def work() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        HostPeakMeter().peak_bytes(work)


def test_peak_bytes_of_a_gpu_adds_memory_outside_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    free, reserved = [1000], [200]
    values = {
        "mem_get_info": lambda _device: (free[0], 5000),
        "memory_reserved": lambda _device: reserved[0],
        "max_memory_reserved": lambda _device: 700,
        "synchronize": lambda _device: events.append("synchronize"),
        "empty_cache": lambda: events.append("empty_cache"),
        "reset_peak_memory_stats": lambda _device: events.append("reset"),
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def work() -> None:
        events.append("work")
        # Torch holds 300 more than before, and 40 are gone that it knows nothing of.
        free[0], reserved[0] = 1000 - 340, 500

    assert CudaPeakMeter(torch.device("cuda")).peak_bytes(work) == 500 + 40
    assert events == ["synchronize", "empty_cache", "reset", "work", "synchronize"]


@pytest.mark.parametrize(
    ("asked", "num_gpus", "expected"),
    [
        ("auto", 0, ["cpu", "cpu", "cpu"]),
        ("cpu", 2, ["cpu", "cpu", "cpu"]),
        ("auto", 1, ["cuda:0", "cuda:0", "cuda:0"]),
        ("cuda", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("auto", 8, ["cuda:0", "cuda:1", "cuda:2"]),
    ],
)
def test_executors_take_gpus_in_turn_when_there_are_several(
    asked: str, num_gpus: int, expected: list[str]
) -> None:
    assert [choose_device(asked, index, num_gpus) for index in range(3)] == expected


def test_choose_device_raises_when_there_is_no_gpu() -> None:
    with pytest.raises(
        BackendUnavailable, match=r"device cuda: torch finds no GPU; .* auto or cpu"
    ):
        choose_device("cuda", 0, 0)
