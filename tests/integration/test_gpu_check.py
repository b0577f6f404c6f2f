"""`make gpu-check` without a GPU: what it says, and that all of it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check.__main__ import main

ROOT = Path(__file__).parents[2]


def test_gpu_check_says_so_in_one_line_when_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert main() == 2
    assert tuple(capsys.readouterr()) == (
        "",
        "gpu-check: there is no CUDA device here (or torch has no CUDA)\n",
    )


def test_gpu_check_runs_every_part_when_it_is_a_smoke_test(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    # Triton and the log are set for the whole process.
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--smoke", "--out", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text(encoding="utf-8"))
    assert {"date", "device", "commit", "torch", "triton", "cuda"} <= written.keys()
    lines = written["measurements"]
    assert {line["section"] for line in lines} == {
        "correct", "device", "decode", "prefill", "kernels", "decoder", "model", "step", "pipeline",
        "time",
    }  # fmt: skip
    assert all(line["is_met"] is not False for line in lines)
    assert len({line["name"] for line in lines}) == len(lines)
