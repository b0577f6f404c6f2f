"""Machines that lack something, as files of /proc and /sys."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from splitserve_cli.checks.finding import State
from splitserve_cli.checks.machine import (
    check_file_limit,
    check_instructions,
    check_memory,
    check_shared_memory,
    check_swap,
    check_threads,
    num_cores,
)

GIB_KB = 2**20


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize(
    ("text", "state"),
    [("", State.OK), ("2", State.OK), ("16", State.WARNING), ("many", State.WRONG)],
)
def test_threads_are_compared_with_cores(text: str, state: State) -> None:
    found = check_threads({"OMP_NUM_THREADS": text} if text else {}, 2.0)
    assert found.state is state


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


def test_memory_is_what_the_machine_or_the_limit_of_its_container_leaves(tmp_path: Path) -> None:
    assert check_memory(tmp_path).state is State.WARNING
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 * GIB_KB} kB\nMemAvailable: {32 * GIB_KB} kB\n")
    assert check_memory(tmp_path).state is State.OK
    write(tmp_path, "sys/fs/cgroup/memory.max", str(4 * 2**30))
    write(tmp_path, "sys/fs/cgroup/memory.current", str(3 * 2**30))
    limited = check_memory(tmp_path)
    assert (limited.state, limited.found) == (
        State.WARNING,
        "1.0 GiB are left of the container's limit",
    )


def test_swap_is_warned_of_when_most_of_it_is_in_use(tmp_path: Path) -> None:
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
    assert check_file_limit(resource.RLIM_INFINITY).found == "any number at most"
