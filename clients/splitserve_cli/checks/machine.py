"""Checks of the machine: threads, instructions, compilers, memory, swap, files, GPU and KV pools.

`root`: folder that holds /proc and /sys; tests use another one.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from splitserve_cli.checks.finding import Finding, ok, warning, wrong
from splitserve_common import parse_json

ROOT = Path("/")
_GIB = 2**30
_LEAST_BYTES = 2 * _GIB
_LEAST_SHM_BYTES = 64 * 2**20
_LEAST_FILES = 4096
_COMPILER_TIMEOUT_S = 120
_MUCH_SWAPPED_RATIO = 0.5
_MUCH_IN_POOLS_RATIO = 0.8
_RECLAIMABLE = ("active_file", "inactive_file")
_GPU_PATHS = ("dev/nvidiactl", "dev/kfd")
# Best first; CPU kernels are compiled for one of the first three.
_INSTRUCTION_SETS = ("avx512_bf16", "avx512f", "avx2", "asimd")


class Pools(Protocol):
    """KV pools of an executor, such as `Executor` of the client."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block; 0 if unknown."""
        ...

    @property
    def num_device_blocks(self) -> int:
        """Blocks in the device pool."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks in the host pool."""
        ...


def num_cores(root: Path = ROOT) -> float:
    """Returns the number of CPU cores this process may use; a container may limit it."""
    number = float(len(os.sched_getaffinity(0)))
    quota, _, period = _text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        number = min(number, int(quota) / int(period))
    return number


def check_threads(
    environ: Mapping[str, str],
    cores: float,
    num_executors: int = 1,
    threads: int | None = None,
) -> Finding:
    """Checks that the torch threads of all executors here do not exceed the cores.

    `threads`: option of each executor, which takes precedence over OMP_NUM_THREADS.
    """
    text = environ.get("OMP_NUM_THREADS", "") if threads is None else str(threads)
    named = f"{'OMP_NUM_THREADS' if threads is None else '--threads'} is {text}"
    if not text:
        if num_executors == 1:
            return ok("threads", f"{cores:g} cores; OMP_NUM_THREADS is not set")
        named, each = "neither --threads nor OMP_NUM_THREADS is set", int(cores)
    elif not text.isdecimal():
        return wrong(
            "threads",
            f"OMP_NUM_THREADS is {text!r}",
            "not a number: ignored",
            "set it to a number of cores, or unset it",
        )
    else:
        each = int(text)
    per_executor = f" for each of {num_executors} executors" if num_executors > 1 else ""
    found = f"{named}{per_executor}; {cores:g} cores"
    if each * num_executors > cores:
        least = max(1, int(cores / num_executors))
        return warning(
            "threads",
            found,
            "on the CPU, more threads than cores make steps many times slower",
            f"give --threads {least}, or set OMP_NUM_THREADS={least}"
            + ("" if num_executors <= cores else f"; run at most {int(cores)} executors"),
        )
    return ok("threads", found)


def check_instructions(root: Path = ROOT) -> Finding:
    """Checks that the CPU has an instruction set that kernels are written for."""
    flags: set[str] = set()
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags.update(value.split())
    found = next((each for each in _INSTRUCTION_SETS if each in flags), None)
    if found is None:
        return warning(
            "instruction set",
            "none of " + ", ".join(_INSTRUCTION_SETS),
            "models on this CPU run with plain torch, several times slower",
            "use another machine or a GPU; schedulers and gateways are not affected",
        )
    return ok("instruction set", found)


def compiler_problems() -> dict[str, str] | None:
    """Returns by name which kernels cannot be compiled here, and why; None if unknown.

    Names are those of `splitserve_kernels.toolchain`, which runs in a process of its own.
    """
    command = [sys.executable, "-P", "-m", "splitserve_kernels.toolchain", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_COMPILER_TIMEOUT_S, check=True)
        problems: dict[str, str] = parse_json(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return problems


def check_compilers(problems: Mapping[str, str] | None, *, is_on_gpu: bool) -> list[Finding]:
    """Checks that an executor's kernels can be compiled; returns nothing if unknown.

    `problems`: result of `compiler_problems`. `is_on_gpu`: whether the executor computes on a GPU.
    """
    if problems is None:
        return []
    name = f"compiler for {'GPU' if is_on_gpu else 'CPU'} kernels"
    problem = problems.get("c_modules" if is_on_gpu else "cpu_kernels")
    if problem is None:
        return [
            ok(name, "available" if is_on_gpu else "available, or the kernels are already compiled")
        ]
    if is_on_gpu:
        meaning = "GPU kernels are not used: plain torch is several times slower"
        remedy = "apt-get install gcc libc6-dev python3-dev (python3-dev: headers of this Python)"
    else:
        meaning = (
            "plain torch is used: 2.5 times slower with one request, 11 times with sixteen;"
            " --deterministic is refused"
        )
        remedy = (
            "apt-get install g++, or set SPLITSERVE_KERNEL_CACHE to a folder of compiled kernels"
        )
    return [warning(name, problem, meaning, remedy)]


def check_memory(root: Path = ROOT) -> Finding:
    """Checks the available memory of the machine, and of the container."""
    lines = (line.partition(":") for line in _text(root / "proc/meminfo").splitlines())
    values = {name: int(text.split()[0]) * 1024 for name, _, text in lines if text.split()}
    if "MemAvailable" not in values:
        return warning(
            "memory", "unknown", "/proc/meminfo cannot be read", "check it by other means"
        )
    left, limit = values["MemAvailable"], _cgroup_left(root)
    found = f"{left / _GIB:.1f} GiB of {values.get('MemTotal', 0) / _GIB:.1f} available"
    if limit is not None and limit < left:
        left, found = limit, f"{limit / _GIB:.1f} GiB left of the container's limit"
    if left < _LEAST_BYTES:
        return warning(
            "memory",
            found,
            "an executor's weights and KV pool may not fit: it may be killed, or swap",
            "free memory, raise the container's limit, or reduce --num-device-blocks and "
            "--num-host-blocks",
        )
    return ok("memory", found)


def check_swap(root: Path = ROOT) -> Finding:
    """Checks that not much memory is swapped to disk."""
    lines = (line.partition(":") for line in _text(root / "proc/meminfo").splitlines())
    values = {name: int(text.split()[0]) * 1024 for name, _, text in lines if text.split()}
    total = values.get("SwapTotal", 0)
    used = total - values.get("SwapFree", 0)
    if total and used / total > _MUCH_SWAPPED_RATIO:
        return warning(
            "swap",
            f"{used / _GIB:.1f} of {total / _GIB:.1f} GiB are in use",
            "steps wait for the disk, at times for seconds; executors may be declared lost",
            "find the processes that use too much memory",
        )
    return ok("swap", f"{used / _GIB:.1f} of {total / _GIB:.1f} GiB are in use")


def check_shared_memory(path: Path = ROOT / "dev/shm") -> Finding:
    """Checks that torch has enough shared memory to share between processes."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return warning(
            "shared memory",
            f"{path}: {error.strerror}",
            "torch may need shared memory",
            "mount a tmpfs there",
        )
    if usage.free < _LEAST_SHM_BYTES:
        return warning(
            "shared memory",
            f"{path} has {usage.free // 2**20} MiB left",
            "torch may be killed with SIGBUS",
            "containers: --shm-size 1g",
        )
    return ok("shared memory", f"{path} has {usage.free / _GIB:.1f} GiB left")


def check_file_limit(soft: int | None = None) -> Finding:
    """Checks that many connections may be open. `soft`: limit; None for that of this process."""
    if soft is None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        return warning(
            "open files",
            f"limit {soft}",
            "each HTTP connection and each session needs one; beyond the limit they are refused",
            "ulimit -n 65536, LimitNOFILE= of systemd, or --ulimit nofile=65536 of a container",
        )
    return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft}")


def has_gpu(root: Path = ROOT) -> bool:
    """Returns whether a GPU driver is loaded."""
    return any((root / path).exists() for path in _GPU_PATHS)


def check_pools(pools: Sequence[Pools], root: Path = ROOT) -> Finding | None:
    """Checks that the KV pools of executors on this machine fit its memory; None without pools.

    Without a GPU, device blocks are in that memory too.
    """
    if not pools or not any(each.block_bytes for each in pools):
        return None
    is_on_gpu = has_gpu(root)
    used = sum(
        each.block_bytes * (each.num_host_blocks + (0 if is_on_gpu else each.num_device_blocks))
        for each in pools
    )
    lines = (line.partition(":") for line in _text(root / "proc/meminfo").splitlines())
    sizes = [int(text.split()[0]) * 1024 for name, _, text in lines if name == "MemTotal"]
    limit = _text(root / "sys/fs/cgroup/memory.max").strip()
    if limit.isdecimal():
        sizes.append(int(limit))
    if not sizes:
        return None
    size = min(sizes)
    counted = f"{len(pools)} executor{'' if len(pools) == 1 else 's'} on this machine"
    found = f"{used / _GIB:.1f} of {size / _GIB:.1f} GiB for {counted}"
    remedy = "reduce --num-device-blocks and --num-host-blocks, or run fewer executors"
    if used > size:
        meaning = "they exceed the memory: as they fill, processes are killed"
        return wrong("pools", found, meaning, remedy)
    if used > _MUCH_IN_POOLS_RATIO * size:
        meaning = (
            "as they fill, little memory is left for weights and the rest: processes may be killed"
        )
        return warning("pools", found, meaning, remedy)
    return ok("pools", found)


def _cgroup_left(root: Path) -> int | None:
    """Returns the bytes left of the container's limit; None without a limit.

    Counts like executors do: page cache of files is reclaimable.
    """
    folder = root / "sys/fs/cgroup"
    limit, used = (_text(folder / name).strip() for name in ("memory.max", "memory.current"))
    if not (limit.isdecimal() and used.isdecimal()):
        return None
    statistics = dict(
        fields
        for line in _text(folder / "memory.stat").splitlines()
        if len(fields := line.split()) == 2
    )
    reclaimable = sum(int(statistics.get(name, 0)) for name in _RECLAIMABLE)
    return max(0, int(limit) - max(0, int(used) - reclaimable))


def _text(path: Path) -> str:
    """Returns the content of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
