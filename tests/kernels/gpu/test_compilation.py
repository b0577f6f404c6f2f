"""The real compiler, which is stricter than the interpreter, takes every kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

# Of one block of threads on an H100.
SHARED_MEMORY_BYTES = 227 * 1024
KERNELS = {
    "_copy_kernel",
    "_decode_kernel",
    "_gated_product_kernel",
    "_merge_kernel",
    "_prefill_kernel",
    "_rms_norm_kernel",
    "_rotary_write_kernel",
    "_write_kernel",
    "cut_kernel",
    "gather_kernel",
    "pick_kernel",
    "pick_largest_kernel",
    "survey_kernel",
    "weigh_kept_kernel",
    "weigh_kernel",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile for this GPU")
def test_kernels_compile_for_an_h100_when_no_gpu_is_here(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu.compile_for_h100"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    shared_bytes = [line.split() for line in result.stdout.splitlines()]
    assert {name for name, _ in shared_bytes} == KERNELS
    assert max(int(size) for _, size in shared_bytes) <= SHARED_MEMORY_BYTES
