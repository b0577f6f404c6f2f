"""The benchmark of several tokens a step: its texts, and the model that says them by heart."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.more_tokens import __main__ as more_tokens
from benchmarks.more_tokens.texts import Text, Workload, make_workloads, next_tokens


def test_texts_are_taken_over_from_prompts_when_they_edit_or_quote() -> None:
    shares = {
        workload.name: min(text.taken_over_ratio for text in workload.texts)
        for workload in make_workloads(3, 384)
    }
    assert shares["random"] == shares["random, 8 at once"] == 0
    assert 0.7 < shares["editing"] < 1
    assert 0.4 < shares["quoting"] < 0.9


def test_next_tokens_are_refused_when_a_token_has_two() -> None:
    twice = Workload("twice", [Text([1, 2], [3, 4]), Text([5, 3], [6])])
    with pytest.raises(ValueError, match="token 3 is followed by two"):
        next_tokens([twice])


def test_benchmark_gets_the_texts_of_the_model_when_it_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--tiny", "--runs", "1", "--threads", "1", "--only", "running on"]
    monkeypatch.setattr(sys, "argv", ["more_tokens", *arguments, "--out", str(tmp_path / "said")])
    more_tokens.main()
    output = capsys.readouterr().out
    runs = json.loads((tmp_path / "said.json").read_text(encoding="utf-8"))["runs"]
    names = {workload.name for workload in make_workloads(1, 96)}
    assert {run["workload"] for run in runs} == names
    assert all(run["is_right"] and run["ms_per_token"] > 0 for run in runs)
    tables = (tmp_path / "said.md").read_text(encoding="utf-8")
    assert tables in output
    assert "| step alone |" in tables
    assert "Other tokens than the model knows: none." in tables
