"""Memory of machine, container and process: free, peak and reserved bytes; device errors.

Also chooses the device of a model.
"""

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
from splitserve_common import parse_json

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
_CGROUP_STATISTICS = Path("/sys/fs/cgroup/memory.stat")
# Page cache counts as used but is reclaimed when memory is needed: the files of a checkpoint, say.
_CGROUP_RECLAIMABLE = ("active_file", "inactive_file")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MAPPINGS = Path("/proc/self/smaps")
# Mapping of a weight file: its first and last address, and how much of it was written to.
_WEIGHT_FILE = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +\S.*\.(?:safetensors|gguf)$(?:\n[A-Z]\w+: .*)*?"
    r"\nAnonymous: +(\d+) kB$",
    re.MULTILINE,
)
_MADV_DONTNEED = 4
# Written to clear_refs, resets the peak to the current use.
_RESET_PEAK = "5"


def available_host_bytes() -> int:
    """Returns the bytes that can still be allocated, within the limit of the container."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read(_CGROUP_LIMIT).strip(), _read(_CGROUP_USED).strip()
    if not (limit.isdigit() and used.isdigit()):
        return available
    statistics = dict(line.split() for line in _read(_CGROUP_STATISTICS).splitlines())
    reclaimable = sum(int(statistics.get(name, 0)) for name in _CGROUP_RECLAIMABLE)
    return min(available, max(0, int(limit) - max(0, int(used) - reclaimable)))


def release_file_pages(mappings: Path = _MAPPINGS) -> None:
    """Releases the resident pages of mapped weight files; a later access loads them again.

    The pages stay in the page cache, which all processes share, but no longer count as memory of
    this process. A mapping with written pages is left alone. `mappings`: smaps file of the Linux
    kernel; on other systems nothing happens.
    """
    for start, end, written_kib in _WEIGHT_FILE.findall(_read(mappings)):
        first, last = int(start, 16), int(end, 16)
        if written_kib == "0":
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED
            )


def release_freed_memory() -> None:
    """Returns freed memory of the host to the system, if the C library can (glibc).

    Freed tensors of some MiB stay with the allocator otherwise.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def format_bytes(num_bytes: int) -> str:
    """Returns a text for people, such as "1.50 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


def _read(path: Path) -> str:
    """Returns the content of a kernel file; empty if there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class PeakMeter(Protocol):
    """Measures peak memory on one device."""

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Runs `work`; returns how far its peak use was above the use before.

        Memory that `work` keeps is included. Passes on what `work` raises.
        """
        ...


class HostPeakMeter:
    """Measures this process, including allocations of its other threads meanwhile."""

    def __init__(self, status: Path = _STATUS, clear_refs: Path = _CLEAR_REFS) -> None:
        """`status`, `clear_refs`: files of the Linux kernel; on other systems neither exists."""
        self._status = status
        self._clear_refs = clear_refs

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Measures as PeakMeter says, without pages of mapped files, which can be reclaimed.

        Where the system cannot reset an earlier, higher peak, the result is too large: it is that
        peak's.
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
    """Measures a GPU: memory that torch reserves, and memory of other libraries in this process."""

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
        # Libraries allocate outside torch (workspaces, code of kernels) and keep that memory.
        besides_torch = (free - free_after) - (torch.cuda.memory_reserved(device) - reserved)
        highest: int = torch.cuda.max_memory_reserved(device)
        return highest - reserved + max(0, besides_torch)


def peak_meter_of(device: torch.device) -> PeakMeter:
    """Returns the meter for `device`."""
    return CudaPeakMeter(device) if device.type == "cuda" else HostPeakMeter()


# -- Host memory that executors have reserved and not yet touched ----------------------------------
#
# The system takes pages of a pool when they are first written, so memory that another executor
# plans to use still looks free. Executors therefore record their reservations: one file each, in a
# shared directory, locked as long as the process lives. The lock of a killed process is gone, and
# the next reader removes its file.

_log = logging.getLogger(__name__)

_LOCK, _SUFFIX = "lock", ".reservation"


@dataclass(frozen=True, slots=True)
class _Reservation:
    """Reservation of an executor. `used_bytes`: memory of process `pid` when it reserved.

    `group`: id shared by the executors that one parent started.
    """

    pid: int
    group: int
    num_bytes: int
    used_bytes: int

    @property
    def untouched_bytes(self) -> int:
        """Estimated number of reserved bytes that the process has not touched yet."""
        taken = max(0, _used_bytes(self.pid) - self.used_bytes)
        return max(0, self.num_bytes - taken)


class HostReservations:
    """Reservations of all executors of this machine; without a directory, none are known."""

    def __init__(self, directory: Path | None = None, num_sharing: int = 1) -> None:
        """Creates `directory` if it is missing; ignores a directory that others could write to.

        `num_sharing`: number of executors that this one's parent starts together, this one
        included.
        """
        self._directory = directory if directory is None or _is_usable(directory) else None
        self._num_sharing = num_sharing
        self._group = os.getppid()

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Context in which no other executor plans. Call the methods below inside."""
        if self._directory is None:
            yield
            return
        with (self._directory / _LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def share_of(self, available_bytes: int, weights_bytes: int) -> int:
        """Returns the bytes of `available_bytes` that this executor may plan with.

        Subtracts the reservations of others, the shares of executors that start together with this
        one and have not reserved yet, and the weights of these, `weights_bytes` each.
        """
        others = list(self._others())
        left = available_bytes - sum(each.untouched_bytes for each in others)
        num_here = sum(each.group == self._group for each in others)
        num_coming = max(0, self._num_sharing - 1 - num_here)
        return max(0, left - num_coming * weights_bytes) // (num_coming + 1)

    def reserve(self, num_bytes: int) -> Callable[[], None]:
        """Records that this process takes `num_bytes` more; returns a function to release them."""
        if self._directory is None:
            return _nothing
        pid = os.getpid()
        path = self._directory / f"{pid}-{secrets.token_hex(8)}{_SUFFIX}"
        reservation = _Reservation(pid, self._group, num_bytes, _used_bytes(pid))
        # Open until it is released or the process ends: a closed file would lose its lock.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps(asdict(reservation)).encode())

        def release() -> None:
            path.unlink(missing_ok=True)
            os.close(descriptor)

        return release

    def _others(self) -> Iterator[_Reservation]:
        """Yields the reservations of live processes; removes the files of dead ones."""
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
                continue  # removed in the meantime, or not a reservation


def default_directory() -> Path:
    """Returns the default directory of reservations of this user."""
    return Path(tempfile.gettempdir()) / f"splitserve-{os.getuid()}"


def _is_usable(directory: Path) -> bool:
    """Creates the directory for this user alone; returns whether it is safe and writable."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        problem = ""
        if not stat.S_ISDIR(found.st_mode):
            problem = "not a directory"
        elif found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            problem = "other users can write to it"
        elif not os.access(directory, os.W_OK):
            problem = "not writable"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        message = (
            "reservations_not_shared directory=%r reason=%r: memory of other executors is ignored"
        )
        _log.warning(message, str(directory), problem)
    return not problem


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _used_bytes(pid: int) -> int:
    """Returns a process's memory without mapped files; 0 if it cannot be read from here."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return int(memory.rss) - int(getattr(memory, "shared", 0))


def _nothing() -> None:
    """Releases nothing."""


# -- Errors of the device, not of the input, and recovery from them --------------------------------

# Texts of memory errors that have no type: torch's CPU allocator, and libraries on a GPU.
_NO_MEMORY_TEXTS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error` says that memory ran out, on the device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, OutOfMemory)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY_TEXTS)


def is_beyond_rows(error: BaseException) -> bool:
    """Returns whether no single row can have caused `error`: no memory, or a lost device."""
    return is_out_of_memory(error) or isinstance(error, (torch.AcceleratorError, StepFailed))


def release_cached_memory(device: torch.device) -> None:
    """Frees the memory that torch caches on `device`, so that it can be allocated in one piece."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- Choice of the device of a model ---------------------------------------------------------------


def choose_device(asked: str, index: int, num_gpus: int) -> str:
    """Returns the torch device of a model: "cpu", or "cuda:0" and so on.

    `asked`: value of --device. `index`: number of the GPU; counts on from the first after the last
    of `num_gpus`, so that there may be more executors than GPUs. Raises BackendUnavailable if there
    is none.
    """
    if asked == "cpu" or (asked == "auto" and num_gpus == 0):
        return "cpu"
    if num_gpus == 0:
        raise BackendUnavailable("device cuda: torch finds no GPU; allowed: auto or cpu")
    return f"cuda:{index % num_gpus}"
