"""A part in a process of its own.

An error of a kernel, a crash or a hang costs the case in which it happened: what follows of the
part is tried by another process. Nothing of a part is left on the device for the next.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu_check.parts import Part
from benchmarks.gpu_check.results import SKIPPED, Measurement, ResultFile

# Where a part, and an executor that it starts, have flash-attn 3 from: the variable of the option.
FLASH_ATTENTION_3_FROM = "SPLITSERVE_FLASH_ATTN_3_FROM"
# The device cannot be used any more.
DEVICE_LOST = 3
_MOST_PROCESSES = 4
# To import torch, and to end when the time is over.
GRACE_S = 45
# A disk takes minutes to write the largest checkpoint (16 GiB). What is left of the memory is for
# the process that loads it.
_MEMORY_FOLDER = Path("/dev/shm")
_ENOUGH_MEMORY = 24 * 2**30


def run_part_apart(
    part: Part,
    command: Sequence[str],
    end_s: float,
    file: ResultFile,
    environment: Mapping[str, str],
    grace_s: float = GRACE_S,
) -> None:
    """Until all cases have been tried, or the time is over.

    `command`: of a process that runs the part; it is told how many seconds are left, and after
    which case it begins. `end_s`: by the monotonic clock. A process that goes on for `grace_s`
    beyond it is killed, with all that it started.
    """
    after: str | None = None
    # What a process that dies leaves, checkpoints say, goes with it.
    with tempfile.TemporaryDirectory(
        prefix="gpu-check-", dir=work_place(), ignore_cleanup_errors=True
    ) as folder:
        own = {**environment, "TMPDIR": folder}
        if part.is_cold:
            own["TRITON_CACHE_DIR"] = str(Path(folder) / "triton")
        for _ in range(_MOST_PROCESSES):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                file.add(part.name, Measurement("the rest", SKIPPED, note="no time is left"))
                return
            flags = ["--left-s", f"{left_s:.1f}", *(["--after", after] if after else [])]
            ended = _run([*command, *flags], left_s + grace_s, own)
            if ended is None:
                return
            begun = file.last_begun(part.name)
            name = f"{begun or part.name}: failed"
            file.add(part.name, Measurement(name, ended, is_met=False))
            if begun is None or begun == after:
                return
            after = begun


def work_place(memory: Path = _MEMORY_FOLDER) -> Path | None:
    """Where checkpoints go: into memory if they fit there; None for the usual folder."""
    if "TMPDIR" in os.environ or not memory.is_dir():
        return None
    return memory if shutil.disk_usage(memory).free >= _ENOUGH_MEMORY else None


def _run(command: Sequence[str], timeout_s: float, environment: dict[str, str]) -> str | None:
    """How it ended; None if that was well."""
    process = subprocess.Popen(command, env=environment, process_group=0)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return "the time was over"
    finally:
        _kill(process)
    if code == DEVICE_LOST:
        return "the device was lost"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with {code}" if code else None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it started, of which something may be left when it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def part_command(part: Part, result_path: Path) -> list[str]:
    """Of this Python, which runs `part` and adds what it finds to the file."""
    return [
        *(sys.executable, "-m", "benchmarks.gpu_check.part_runner"),
        *("--part", part.name, "--results", str(result_path)),
    ]
