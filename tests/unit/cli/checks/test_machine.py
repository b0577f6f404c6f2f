"""Checks of the machine, with files of /proc and /sys."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from splitserve_cli.checks.finding import State
from splitserve_cli.checks.machine import (
    check_compilers,
    check_file_limit,
    check_instructions,
    check_memory,
    check_pools,
    check_shared_memory,
    check_swap,
    check_threads,
    compiler_problems,
    num_cores,
)

GIB_KB = 2**20


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_cores_of_a_container_are_those_that_it_may_use(tmp_path: Path) -> None:
    whole = num_cores(tmp_path)
    write(tmp_path, "sys/fs/cgroup/cpu.max", "50000 100000\n")
    assert num_cores(tmp_path) == 0.5
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert num_cores(tmp_path) == whole >= 1


@pytest.mark.parametrize(
    ("flags", "state", "found"),
    [
        ("flags : fpu sse4_2 avx2 avx512f", State.OK, "avx512f"),
        ("Features : fp asimd", State.OK, "asimd"),
        ("flags : fpu sse4_2", State.WARNING, "none of"),
    ],
)
def test_instruction_sets_are_those_of_the_kernels(
    tmp_path: Path, flags: str, state: State, found: str
) -> None:
    write(tmp_path, "proc/cpuinfo", f"processor : 0\n{flags}\n")
    finding = check_instructions(tmp_path)
    assert finding.state is state
    assert found in finding.found


def test_memory_is_limited_by_machine_or_container(tmp_path: Path) -> None:
    assert check_memory(tmp_path).state is State.WARNING
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 * GIB_KB} kB\nMemAvailable: {32 * GIB_KB} kB\n")
    assert check_memory(tmp_path).state is State.OK
    write(tmp_path, "sys/fs/cgroup/memory.max", str(4 * 2**30))
    write(tmp_path, "sys/fs/cgroup/memory.current", str(3 * 2**30))
    limited = check_memory(tmp_path)
    assert (limited.state, limited.found) == (
        State.WARNING,
        "1.0 GiB left of the container's limit",
    )


def test_swap_is_warned_of_when_mostly_used(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", f"SwapTotal: {4 * GIB_KB} kB\nSwapFree: {GIB_KB} kB\n")
    assert check_swap(tmp_path).state is State.WARNING
    write(tmp_path, "proc/meminfo", f"SwapTotal: {4 * GIB_KB} kB\nSwapFree: {3 * GIB_KB} kB\n")
    assert check_swap(tmp_path).state is State.OK


def test_shared_memory_is_warned_of_when_it_is_not_there(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path / "none").state is State.WARNING
    assert "MiB" in check_shared_memory(tmp_path).found or "GiB" in (
        check_shared_memory(tmp_path).found
    )


def test_open_files_are_warned_of_when_few_are_allowed() -> None:
    assert check_file_limit(1024).state is State.WARNING
    assert check_file_limit(65536).state is State.OK
    assert check_file_limit(resource.RLIM_INFINITY).found == "no limit"


@pytest.mark.parametrize(
    ("text", "num_executors", "threads", "state"),
    [
        ("", 2, None, State.WARNING),
        ("2", 2, None, State.OK),
        ("2", 3, None, State.WARNING),
        ("16", 2, 2, State.OK),
        ("1", 2, 3, State.WARNING),
        ("", 1, None, State.OK),
        ("4", 1, None, State.OK),
        ("16", 1, None, State.WARNING),
        ("many", 1, None, State.WRONG),
    ],
)
def test_threads_of_all_executors_are_compared_with_cores(
    text: str, num_executors: int, threads: int | None, state: State
) -> None:
    environ = {"OMP_NUM_THREADS": text} if text else {}
    found = check_threads(environ, 4.0, num_executors, threads)
    assert found.state is state
    if state is State.WARNING:
        assert f"OMP_NUM_THREADS={4 // num_executors}" in found.remedy


@dataclass(frozen=True, slots=True)
class ListedPools:
    block_bytes: int
    num_device_blocks: int
    num_host_blocks: int


@pytest.mark.parametrize(
    ("num_blocks", "limit_gib", "has_gpu", "state"),
    [
        (4, None, False, State.OK),
        (5, None, False, State.WARNING),
        (6, None, False, State.WRONG),
        (6, None, True, State.OK),
        (4, 3, False, State.WRONG),
        (4, 3, True, State.OK),
    ],
)
def test_pools_of_executors_here_are_compared_with_memory(
    tmp_path: Path, num_blocks: int, limit_gib: int | None, has_gpu: bool, state: State
) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal: {11 * GIB_KB} kB\n")
    if limit_gib is not None:
        write(tmp_path, "sys/fs/cgroup/memory.max", f"{limit_gib << 30}\n")
    if has_gpu:
        write(tmp_path, "dev/nvidiactl", "")
    pools = [ListedPools(1 << 30, num_blocks, num_blocks // 6), ListedPools(1 << 30, num_blocks, 0)]
    finding = check_pools(pools, tmp_path)
    assert finding is not None
    assert finding.state is state


def test_pools_are_skipped_when_sizes_are_unknown(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal: {8 * GIB_KB} kB\n")
    assert check_pools([], tmp_path) is None
    assert check_pools([ListedPools(0, 9, 9)], tmp_path) is None


def test_page_cache_is_not_used_memory(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 * GIB_KB} kB\nMemAvailable: {50 * GIB_KB} kB\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{16 * 2**30}\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", f"{15 * 2**30}\n")
    assert check_memory(tmp_path).state is State.WARNING
    statistics = f"anon {5 * 2**30}\nactive_file {2 * 2**30}\ninactive_file {7 * 2**30}\n"
    write(tmp_path, "sys/fs/cgroup/memory.stat", statistics)
    found = check_memory(tmp_path)
    assert (found.state, found.found) == (State.OK, "10.0 GiB left of the container's limit")


@pytest.mark.parametrize(
    ("problems", "is_on_gpu", "states"),
    [
        ({}, True, [State.OK]),
        ({}, False, [State.OK]),
        ({"c_modules": "no gcc"}, True, [State.WARNING]),
        # A CPU's kernels are compiled otherwise.
        ({"c_modules": "no gcc"}, False, [State.OK]),
        ({"cpu_kernels": "no g++"}, False, [State.WARNING]),
        ({"cpu_kernels": "no g++"}, True, [State.OK]),
        # Where that is not known, nothing is said of it.
        (None, False, []),
    ],
)
def test_compilers_are_those_of_where_is_computed(
    problems: dict[str, str] | None, is_on_gpu: bool, states: list[State]
) -> None:
    assert [each.state for each in check_compilers(problems, is_on_gpu=is_on_gpu)] == states


def test_compiler_that_is_missing_is_told_with_what_that_costs() -> None:
    (on_gpu,) = check_compilers({"c_modules": "no gcc"}, is_on_gpu=True)
    (on_cpu,) = check_compilers({"cpu_kernels": "no g++"}, is_on_gpu=False)
    assert (on_gpu.found, on_cpu.found) == ("no gcc", "no g++")
    assert "slower" in on_gpu.meaning
    assert "11 times with sixteen" in on_cpu.meaning
    assert "gcc" in on_gpu.remedy
    assert "g++" in on_cpu.remedy


def test_compiler_problems_are_those_of_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SPLITSERVE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    problems = compiler_problems()
    assert problems is not None
    assert problems.keys() == {"c_modules", "cpu_kernels"}
    # Where the executor is not installed as we know it.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert compiler_problems() is None
