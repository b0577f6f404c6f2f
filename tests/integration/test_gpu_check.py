"""`make gpu-check` without a GPU: what it says, and that all of it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_gpu_check_says_so_in_one_line_when_there_is_no_gpu() -> None:
    result = _run()
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "gpu-check: there is no CUDA device here (or torch has no CUDA)"
    ]


def test_gpu_check_runs_every_part_when_it_is_a_smoke_test(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    result = _run("--smoke", "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text(encoding="utf-8"))
    assert {"date", "device", "commit", "torch", "triton", "cuda"} <= written.keys()
    lines = written["measurements"]
    assert {line["section"] for line in lines} == {
        "correct", "device", "decode", "prefill", "kernels", "decoder", "model", "step", "time",
    }  # fmt: skip
    assert all(line["is_met"] is not False for line in lines)
    assert len({line["name"] for line in lines}) == len(lines)
