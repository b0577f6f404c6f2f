from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_service.device.memory import CudaPeakMeter, HostPeakMeter

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


def test_peak_bytes_is_too_much_rather_than_too_little_when_the_system_cannot_forget(
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


def test_peak_bytes_adds_what_is_beside_torch_when_it_is_a_gpu(
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
