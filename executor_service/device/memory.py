"""Memory of this machine and its container, and how much something takes at its peak."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil
import torch

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
_CGROUP_STATISTICS = Path("/sys/fs/cgroup/memory.stat")
# Files in the page cache count as used, but make room when it is needed: a checkpoint, say.
_CGROUP_RECLAIMABLE = ("active_file", "inactive_file")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MAPPINGS = Path("/proc/self/smaps")
# A mapping of a weight file: its first and last address, and how much of it was written to.
_WEIGHT_FILE = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +\S.*\.safetensors$(?:\n[A-Z]\w+: .*)*?"
    r"\nAnonymous: +(\d+) kB$",
    re.MULTILINE,
)
_MADV_DONTNEED = 4
# Written to clear_refs, it sets the peak to what is in use now.
_RESET_PEAK = "5"


def available_host_bytes() -> int:
    """Bytes that can still be allocated here: what the system has, within the container's limit."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read(_CGROUP_LIMIT).strip(), _read(_CGROUP_USED).strip()
    if not (limit.isdigit() and used.isdigit()):
        return available
    statistics = dict(line.split() for line in _read(_CGROUP_STATISTICS).splitlines())
    reclaimable = sum(int(statistics.get(name, 0)) for name in _CGROUP_RECLAIMABLE)
    return min(available, max(0, int(limit) - max(0, int(used) - reclaimable)))


def release_file_pages(mappings: Path = _MAPPINGS) -> None:
    """Takes the pages of mapped weight files from this process; whoever reads them gets them again.

    They stay in the page cache, which all processes share, but count as memory of this process no
    longer. A mapping of which anything was written is left alone. `mappings`: a file of the Linux
    kernel; elsewhere nothing happens.
    """
    for start, end, written_kib in _WEIGHT_FILE.findall(_read(mappings)):
        first, last = int(start, 16), int(end, 16)
        if written_kib == "0":
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED
            )


def format_bytes(num_bytes: int) -> str:
    """For people: "1.50 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


def _read(path: Path) -> str:
    """Content of a file of the kernel; empty where there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class PeakMeter(Protocol):
    """Measures on one device."""

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Runs `work`; returns by how much its peak was above what was in use before.

        What it keeps is part of that. Passes on what `work` raises.
        """
        ...


class HostPeakMeter:
    """Measures this process. Others may allocate in it meanwhile, which counts as well."""

    def __init__(self, status: Path = _STATUS, clear_refs: Path = _CLEAR_REFS) -> None:
        """`status`, `clear_refs`: files of the Linux kernel; elsewhere neither exists."""
        self._status = status
        self._clear_refs = clear_refs

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Leaves out pages of mapped files: those of the weights make room when it is needed.

        Where the system cannot forget an earlier, higher peak, the result is that peak's: too much.
        """
        with suppress(OSError):
            self._clear_refs.write_text(_RESET_PEAK, encoding="ascii")
        process = psutil.Process()
        before = process.memory_info()
        work()
        file_bytes = getattr(process.memory_info(), "shared", 0) - getattr(before, "shared", 0)
        return max(0, self._highest_bytes() - int(before.rss) - max(0, int(file_bytes)))

    def _highest_bytes(self) -> int:
        with suppress(OSError):
            for line in self._status.read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest if sys.platform == "darwin" else highest * 1024


class CudaPeakMeter:
    """Measures a GPU: what torch reserves there, and what others in this process take."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_bytes(self, work: Callable[[], None]) -> int:
        device = self._device
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        work()
        torch.cuda.synchronize(device)
        free_after, _ = torch.cuda.mem_get_info(device)
        # Libraries allocate past torch (workspaces, code of kernels), and keep it.
        besides_torch = (free - free_after) - (torch.cuda.memory_reserved(device) - reserved)
        highest: int = torch.cuda.max_memory_reserved(device)
        return highest - reserved + max(0, besides_torch)


def peak_meter_of(device: torch.device) -> PeakMeter:
    """What measures `device`."""
    return CudaPeakMeter(device) if device.type == "cuda" else HostPeakMeter()
