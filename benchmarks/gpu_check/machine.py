"""What the machine has: its device, its packages and tools, and how fast its device is."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_check.timing import median_s
from benchmarks.gpu_check.wheels import SERVER, TESTS

if TYPE_CHECKING:
    # It imports all that computes, which takes seconds.
    from benchmarks.gpu_check.sizes import Sizes

ROOT = Path(__file__).parents[2]
# The kernels and whole models need the first line, the server the second, the tests the third.
PACKAGES = {
    "kernels": ("torch", "triton", "transformers", "safetensors", "numpy", "psutil"),
    "server": SERVER,
    "tests": TESTS,
    "others": ("flash-attn", "flash_attn_3", "kernels", "nvidia-cudnn-cu13"),
}  # fmt: skip
# Triton compiles a launcher with the first; none is needed else.
TOOLS = ("cc", "gcc", "nvcc", "make", "git")


# In the first line of a result file: why flash-attn 3 is not measured, or null.
FLASH_ATTENTION_3_REFUSED = "flash_attn_3_refused"


@dataclass(frozen=True, slots=True)
class Rates:
    """What large operations reach: bytes a second read and written, operations a second."""

    bandwidth: float
    flops: float

    def floor_s(self, num_bytes: float, num_operations: float) -> float:
        """What no program is faster than that reads so much and computes so much."""
        return max(num_bytes / self.bandwidth, num_operations / self.flops)


@functools.cache
def rates_of(sizes: Sizes) -> Rates:
    """Measured, once a process. What fills the device asks for it first."""
    rates = Rates(copy_bandwidth(sizes), matrix_flops(sizes))
    if sizes.device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def copy_bandwidth(sizes: Sizes) -> float:
    """Bytes per second that a copy on the device reads and writes."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    seconds = median_s(lambda: target.copy_(source), sizes.device, sizes.num_runs)
    return 2 * sizes.copy_bytes / seconds


def matrix_flops(sizes: Sizes) -> float:
    """Operations per second of a large matrix product."""
    size = sizes.matrix_size
    a, b = torch.randn(2, size, size, dtype=sizes.dtype, device=sizes.device)
    return 2 * size**3 / median_s(lambda: a @ b, sizes.device, sizes.num_runs)


def describe(device: torch.device, commit: str | None) -> dict[str, Any]:
    """The first line of a result file. `commit`: None to ask git, and the files without it."""
    now = datetime.datetime.now(datetime.UTC)
    names = [name for group in PACKAGES.values() for name in group]
    return {
        "date": now.date().isoformat(),
        "time": now.strftime("%H:%M:%S"),
        "device": device_name(device),
        "commit": commit or _commit() or _files_digest(),
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in names},
        "tools": {name: shutil.which(name) for name in TOOLS},
        "num_cpus": os.cpu_count(),
    }


def device_name(device: torch.device) -> str:
    """As its driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def package_version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    return _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _commit() -> str | None:
    return _said("git", "describe", "--always", "--dirty", "--abbrev=12")


def _said(*command: str) -> str | None:
    """The first line that it prints; None where there is no such command, or it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20, cwd=ROOT
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.splitlines() or [""])[0].strip() or None


def _files_digest() -> str:
    """Where there is no git, the sources tell one state from another."""
    digest = hashlib.sha256()
    for folder in ("benchmarks/gpu_check", "executor_service", "kernels", "scheduler_service"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return f"files {digest.hexdigest()[:12]}"


def main() -> int:
    """Prints what the machine is, as JSON; exit code 2 without a GPU."""
    if not torch.cuda.is_available():
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    found = describe(device, next(iter(sys.argv[1:]), None))
    found[FLASH_ATTENTION_3_REFUSED] = _why_no_flash_attention_3()
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def _why_no_flash_attention_3() -> str | None:
    """Returns the reason why flash-attn 3 cannot run on this machine; None if it can."""
    # It imports all that computes, which takes seconds.
    from benchmarks.gpu_check.backends import FLASH_ATTENTION_3, why_absent

    return why_absent().get(FLASH_ATTENTION_3)


if __name__ == "__main__":
    sys.exit(main())
