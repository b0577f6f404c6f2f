"""Benchmarks run to their end and say what they promise; what they measure is not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitserve_kernels.cpu.library import STEP_PARTS
from tests.support.models.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
_PATHS = (ROOT, ROOT / "protos", ROOT / "kernels", ROOT / "clients")


def _run(name: str, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """The JSON objects that a benchmark prints, and all of its output."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _PATHS))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines], done.stdout


@pytest.mark.parametrize(
    ("name", "arguments", "figures"),
    [
        ("wire", "--rows 4 --steps 60", {"rows", "median_us"}),
        ("scheduler", "--seqs 8 --steps 20", {"n", "prefix_caching", "step_us", "p99_us"}),
        ("journal", "--rows 4 --steps 200", set()),
        ("startup", "--runs 1", set()),
    ],
)
def test_benchmark_prints_its_figures_when_it_is_run(
    name: str, arguments: str, figures: set[str]
) -> None:
    results, _ = _run(name, *arguments.split())
    assert results
    assert all(figures <= result.keys() for result in results)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Smaller than the bundled one: it is ready sooner."""
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("model")))


def test_serving_says_what_the_services_cost_when_it_is_run(model: str) -> None:
    sizes = ("--requests", "2", "--tokens", "4", "--runs", "1", "--threads", "1")
    ((result, *_), _) = _run("serving", "--model", model, *sizes)
    assert {"served_tokens_per_s", "alone_tokens_per_s", "loss_ratio"} <= result.keys()


def test_profile_names_every_part_when_it_takes_steps_apart() -> None:
    sizes = ("--rows", "2", "--context", "20", "--prompt", "20", "--threads", "1")
    results, output = _run("profile", "--steps", "1", *sizes)
    limits, *parts = results
    assert limits["gb_per_s"] > 0
    assert limits["gflops"] > 0
    for step in ("2 decodes behind 20 tokens", "a prompt of 20 tokens"):
        figures = {result["part"]: result for result in parts if result["step"] == step}
        assert {"messages", "inputs", *STEP_PARTS, "sampling", "step"} == figures.keys()
        assert figures["attention"]["of_limit"] > 0
        assert figures["step"]["share"] == 1
        assert f"\n{step} " in output


def test_accuracy_finds_no_difference_when_no_option_is_changed() -> None:
    sizes = ("--each", "2", "--tokens", "8", "--threads", "1")
    arguments = ("--prompts", "Tell me a story about a fox.", *sizes)
    ((result,), _) = _run("accuracy", *arguments, "--options", "--log-level warning")
    assert (result["kl_divergence"], result["same_top_ratio"]) == (0.0, 1.0)
    assert result["num_tokens"] == 16


def test_peers_puts_a_peers_figures_beside_ours_when_it_is_given_some(
    model: str, tmp_path: Path
) -> None:
    workloads_file, peer_file = tmp_path / "workloads.json", tmp_path / "peer.json"
    workloads = {
        "warmup": [{"prompt": [5, 6], "out": 2}],
        "b1": [{"prompt": [7, 8, 9], "out": 4}],
    }
    workloads_file.write_text(json.dumps(workloads))
    runs = [{"workload": "b1", "out_tok_s": 12.5, "tpot_p50": 0.08}]
    peer = {"startup_to_first_token_s": 33.0, "peak_rss_MiB": 99, "runs": runs}
    peer_file.write_text(json.dumps(peer))
    arguments = ("--model", model, "--threads", "1", "--workloads", str(workloads_file))
    (result,), output = _run("peers", *arguments, "--runs", "1", "--peer", f"other={peer_file}")
    assert result["workload"] == "b1"
    table = {line.split("  ")[0]: line.split()[-1] for line in output.splitlines()[1:]}
    assert table["start to first token, s"] == "33.0"
    assert table["peak memory, MiB"] == "99"
    assert "12.5 (12.5 to 12.5)" in output
