"""Memory of this machine, and of the container that limits it."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
_CGROUP_STATISTICS = Path("/sys/fs/cgroup/memory.stat")
# Files in the page cache count as used, but make room when it is needed: a checkpoint, say.
_CGROUP_RECLAIMABLE = ("active_file", "inactive_file")


def available_host_bytes() -> int:
    """Bytes that can still be allocated here: what the system has, within the container's limit."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read(_CGROUP_LIMIT).strip(), _read(_CGROUP_USED).strip()
    if not (limit.isdigit() and used.isdigit()):
        return available
    statistics = dict(line.split() for line in _read(_CGROUP_STATISTICS).splitlines())
    reclaimable = sum(int(statistics.get(name, 0)) for name in _CGROUP_RECLAIMABLE)
    return min(available, max(0, int(limit) - max(0, int(used) - reclaimable)))


def format_bytes(num_bytes: int) -> str:
    """For people: "1.50 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


def _read(path: Path) -> str:
    """Content of a file of the kernel; empty where there is no such file."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
