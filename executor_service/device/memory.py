"""Memory of this machine and its container, and how much something takes at its peak."""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import re
import resource
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch

from executor_service.errors import BackendUnavailable, OutOfMemory, StepFailed
from splitserve_rpc.json_text import parse_json

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


# -- Memory of this machine that executors have reserved and not yet touched -----------------------
#
# The pages of a pool are taken when they are first written, so memory that another executor has
# planned for still looks free. Executors therefore write down what they reserve: a file for each,
# in a directory that they share, locked as long as its process lives. The lock of a process that
# was killed is gone, and whoever looks next removes its file.

_log = logging.getLogger(__name__)

_LOCK, _SUFFIX = "lock", ".reservation"


@dataclass(frozen=True, slots=True)
class _Reservation:
    """`used_bytes`: what process `pid` had when it reserved. `group`: of executors that share."""

    pid: int
    group: int
    num_bytes: int
    used_bytes: int

    @property
    def untouched_bytes(self) -> int:
        """What the process has not taken yet, as far as can be seen."""
        taken = max(0, _used_bytes(self.pid) - self.used_bytes)
        return max(0, self.num_bytes - taken)


class HostReservations:
    """What executors of this machine have reserved. Without a directory this one knows of none."""

    def __init__(self, directory: Path | None = None, num_sharing: int = 1) -> None:
        """Makes `directory` if it is missing; one that others could write to is not used.

        `num_sharing`: executors that this one's parent starts together, this one included.
        """
        self._directory = directory if directory is None or _is_usable(directory) else None
        self._num_sharing = num_sharing
        self._group = os.getppid()

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Keeps other executors from planning meanwhile. Call the methods below inside."""
        if self._directory is None:
            yield
            return
        with (self._directory / _LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def share_of(self, available_bytes: int, weights_bytes: int) -> int:
        """Returns what this executor may plan with, of the `available_bytes` of this machine.

        Left out is what others have reserved, the share of those that start together with this one
        and have not reserved yet, and the weights of these, `weights_bytes` each.
        """
        others = list(self._others())
        left = available_bytes - sum(each.untouched_bytes for each in others)
        num_here = sum(each.group == self._group for each in others)
        num_coming = max(0, self._num_sharing - 1 - num_here)
        return max(0, left - num_coming * weights_bytes) // (num_coming + 1)

    def reserve(self, num_bytes: int) -> Callable[[], None]:
        """Writes down that this process takes `num_bytes` more; returns what takes that back."""
        if self._directory is None:
            return _nothing
        pid = os.getpid()
        path = self._directory / f"{pid}-{secrets.token_hex(8)}{_SUFFIX}"
        reservation = _Reservation(pid, self._group, num_bytes, _used_bytes(pid))
        # Until it is released, or its process ends: closed, the file would lose its lock.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps(asdict(reservation)).encode())

        def release() -> None:
            path.unlink(missing_ok=True)
            os.close(descriptor)

        return release

    def _others(self) -> Iterator[_Reservation]:
        """All reservations of processes that live; files of others are removed."""
        if self._directory is None:
            return
        for path in self._directory.glob(f"*{_SUFFIX}"):
            try:
                with path.open("r", encoding="ascii") as file:
                    if _is_locked(file.fileno()):
                        yield _Reservation(**parse_json(file.read()))
                    else:
                        path.unlink(missing_ok=True)
            except (OSError, ValueError, TypeError):
                continue  # it has just gone, or is nobody's


def default_directory() -> Path:
    """Of this user, where no other is told."""
    return Path(tempfile.gettempdir()) / f"splitserve-{os.getuid()}"


def _is_usable(directory: Path) -> bool:
    """Makes it, for this user alone."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        problem = ""
        if not stat.S_ISDIR(found.st_mode):
            problem = "it is no directory"
        elif found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            problem = "others can write to it"
        elif not os.access(directory, os.W_OK):
            problem = "it cannot be written to"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        message = "reservations_not_shared directory=%r reason=%r: other executors are not counted"
        _log.warning(message, str(directory), problem)
    return not problem


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _used_bytes(pid: int) -> int:
    """What a process has for itself; 0 if it cannot be seen from here. Mapped files are not its."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return int(memory.rss) - int(getattr(memory, "shared", 0))


def _nothing() -> None:
    """Takes back nothing."""


# -- Errors that are about the device and not about the input, and how to recover from them --------

# What has no exception type of its own: the CPU allocator of torch, and libraries on a GPU.
_NO_MEMORY_TEXTS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on the device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, OutOfMemory)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY_TEXTS)


def is_beyond_rows(error: BaseException) -> bool:
    """Whether no single row can explain `error`: no memory, or a device that is lost."""
    return is_out_of_memory(error) or isinstance(error, (torch.AcceleratorError, StepFailed))


def release_cached_memory(device: torch.device) -> None:
    """Gives back what torch keeps for reuse on `device`, so that pieces of it can be had as one."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- Where a model runs: on the CPU, or on which of several GPUs -----------------------------------


def choose_device(asked: str, index: int, num_gpus: int) -> str:
    """Where torch is to put a model: on "cpu", or on "cuda:0" and so on.

    `asked`: as --device takes it. `index`: of the GPU; beyond the last of `num_gpus` it starts
    over, so that executors may be more than GPUs. Raises BackendUnavailable if there is none.
    """
    if asked == "cpu" or (asked == "auto" and num_gpus == 0):
        return "cpu"
    if num_gpus == 0:
        raise BackendUnavailable("device cuda: torch sees no GPU here; allowed: auto or cpu")
    return f"cuda:{index % num_gpus}"
