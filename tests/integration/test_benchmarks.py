"""Tests that benchmarks run and print their figures; the figures are not judged.

They run in this process, which has imported what they need, and share one pair of services.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accuracy, peers, serving, step_cost
from benchmarks.more_tokens import __main__ as more_tokens
from benchmarks.more_tokens.texts import Text, Workload, make_workloads, next_tokens
from splitserve_kernels.cpu import STEP_PARTS, load_library

ROOT = Path(__file__).parents[2]
_PATHS = (ROOT, ROOT / "common", ROOT / "protos", ROOT / "kernels", ROOT / "clients")

Run = Callable[..., tuple[list[dict[str, Any]], str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a benchmark; returns the JSON objects that it prints, and all of its output."""

    def run_main(name: str, *arguments: str) -> tuple[list[dict[str, Any]], str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        importlib.import_module(f"benchmarks.{name}").main()
        output = capsys.readouterr().out
        return _results(output), output

    return run_main


def _results(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("name", "arguments", "figures"),
    [
        ("wire", "--rows 4 --steps 60", {"rows", "median_us"}),
        ("scheduler", "--seqs 8 --steps 20", {"n", "prefix_caching", "step_us", "p99_us"}),
        ("journal", "--rows 4 --steps 200", set()),
        ("http", "--streams 20 --tokens 10 --seconds 0.2", {"cpu_s"}),
        ("grammars", "--vocab 400 --rows 2 --steps 4", {"vocab_size"}),
        ("callers", "--runs 10 --keys 10", {"door_us", "known_us"}),
        (
            "quantised_formats",
            "--tokens 40 --threads 1 --formats NVFP4",
            {"format", "bits_per_weight", "perplexity"},
        ),
        pytest.param(
            "cpu_kernels",
            "--turns 1 --only products",
            {"kernel", "size", "gflops", "share"},
            marks=pytest.mark.thorough("seconds of products at full size; `profile` stays"),
        ),
        pytest.param(
            "cpu_kernels",
            "--turns 1 --only decodes",
            {"kernel", "size", "gb_per_s", "share"},
            marks=pytest.mark.thorough("gigabytes of keys and values; `profile` stays"),
        ),
        pytest.param(
            "load_memory",
            "--size small",
            {"seconds", "resident_ratio", "anonymous_ratio", "left_ratio"},
            marks=pytest.mark.thorough(
                "a process that imports everything; `quantised_formats` stays"
            ),
        ),
        pytest.param(
            "grpc_messages",
            "--streams 2 --messages 20 --rounds 1 --ways bytes sockets synchronous",
            {"way", "threads", "us", "switches"},
            marks=pytest.mark.thorough("a process for each way; `wire` stays"),
        ),
        pytest.param(
            "gateway_parsing",
            "--base HEAD --rounds 1 --requests 2",
            {"case", "figure", "ratio", "interval"},
            marks=pytest.mark.thorough("a worktree and two gateways; `http` stays"),
        ),
        pytest.param(
            "peers",
            "http --model executor_service/bundled_model --rounds 1 --streams 1 8 "
            "--requests-per-stream 1 --prompt-lengths 8 16 --output-lengths 16 24 "
            "--long-prompt 600 --decode-tokens 700",
            {"engine", "row"},
            marks=pytest.mark.thorough("a stack; `test_bench_peers_http` stays"),
        ),
        pytest.param(
            "ceiling",
            "--executors 1 --rows 4 --step-ms 2 --seconds 0.5 --prompt-tokens 20 --max-tokens 2",
            {"us_per_step", "us_per_request"},
            marks=pytest.mark.thorough("processes and a load; `serving` stays"),
        ),
        pytest.param(
            "observability_cost",
            "--executors 1 --rows 4 --step-ms 2 --seconds 0.5 --warm-up 0.2 --rounds 1",
            {"tokens_per_s"},
            marks=pytest.mark.thorough("a stack for each thing watched: a minute; `serving` stays"),
        ),
    ],
)
def test_benchmark_prints_its_figures_when_it_is_run(
    run: Run, name: str, arguments: str, figures: set[str]
) -> None:
    results, _ = run(name, *arguments.split())
    assert results
    assert all(figures <= result.keys() for result in results)


@pytest.mark.thorough("two stacks; `serving` stays")
def test_adapters_says_what_rows_and_slots_cost(run: Run) -> None:
    sizes = "--hidden-size 128 --layers 1 --rank 4 --threads 1"
    rows = "--rows 4 --adapters 2 --tokens 4 --runs 1"
    many = "--registered 20 --used 4 --max-adapters 2 --requests 8 --short-tokens 2"
    step = "--step-rows 4 --step-adapters 2 --steps 3"
    results, _ = run("adapters", *f"{sizes} {rows} {many} {step}".split())
    planned, *rates, served = results
    assert (planned["rows"], planned["adapters"]) == (4, 2)
    assert [each["adapters"] for each in rates] == [0, 1, 2]
    assert all(each["tokens_per_s"] > 0 for each in rates)
    assert (served["requests"], served["failures"]) == (8, 0)


@pytest.mark.thorough("processes that import everything; `serving` stays")
def test_startup_prints_its_figures_when_it_is_run_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.startup", "--runs", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _PATHS))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (result,) = _results(done.stdout)
    assert result["median_s"] > 0


@pytest.mark.thorough("stacks under a load; `wire` and `serving` stay")
def test_step_cost_knows_what_a_step_costs_each_process() -> None:
    with step_cost.open_stack({}, max_run_ahead=1, threads=1) as stack:
        cost = stack.ask(num_rows=1, num_tokens=4)

    processes = ("scheduler", "executor", "client")
    figures = (f"{process}_{figure}" for process in processes for figure in ("us", "switches"))
    assert cost.keys() == set(figures)
    assert all(figure > 0 for figure in cost.values())


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving.serving("bundled", 1) as address:
        yield address


@pytest.fixture
def started(address: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Benchmarks get the services of `address`; what they would start them with is kept."""
    calls: list[tuple[Any, ...]] = []

    @contextmanager
    def serving_already(*arguments: Any) -> Iterator[str]:  # noqa: ANN401
        calls.append(arguments)
        yield address

    for module in (accuracy, peers, serving):
        monkeypatch.setattr(module, "serving", serving_already)
    return calls


def test_serving_says_what_the_services_cost_when_it_is_run(
    run: Run, started: list[tuple[Any, ...]]
) -> None:
    (result,), _ = run(
        "serving", "--requests", "2", "--tokens", "4", "--runs", "1", "--threads", "1"
    )
    assert {"served_tokens_per_s", "alone_tokens_per_s", "loss_ratio"} <= result.keys()
    assert started == [("bundled", 1)]


@pytest.mark.thorough("it takes a model apart; `serving` stays")
def test_profile_names_every_part_when_it_takes_steps_apart(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The benchmark sets it for the whole process.
    monkeypatch.setattr(load_library(), "part_ns", None)
    sizes = ("--rows", "2", "--context", "20", "--prompt", "20", "--threads", "1")
    results, output = run("profile", "--steps", "1", *sizes)
    limits, *parts = results
    assert limits["gb_per_s"] > 0
    assert limits["gflops"] > 0
    for step in ("2 decodes behind 20 tokens", "a prompt of 20 tokens"):
        figures = {result["part"]: result for result in parts if result["step"] == step}
        assert {"messages", "inputs", *STEP_PARTS, "sampling", "step"} == figures.keys()
        # Of so little the figures may be rounded to nothing.
        assert figures["attention"].keys() >= {"ms", "gflops", "gb_per_s", "of_limit"}
        assert figures["step"]["share"] == 1
        assert f"\n{step} " in output


def test_accuracy_finds_no_difference_when_no_option_is_changed(
    run: Run, started: list[tuple[Any, ...]]
) -> None:
    sizes = ("--each", "2", "--tokens", "8", "--threads", "1")
    arguments = ("--prompts", "Tell me a story about a fox.", *sizes)
    (result,), _ = run("accuracy", *arguments, "--options", "--log-level warning")
    assert (result["kl_divergence"], result["same_top_ratio"]) == (0.0, 1.0)
    assert result["num_tokens"] == 16
    assert started == [("bundled", 1), ("bundled", 1, "--log-level", "warning")]


def test_peers_puts_figures_of_others_beside_ours(
    run: Run, started: list[tuple[Any, ...]], tmp_path: Path
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
    arguments = ("--model", "bundled", "--threads", "1", "--workloads", str(workloads_file))
    objects, output = run("peers", *arguments, "--runs", "1", "--peer", f"other={peer_file}")
    assert started == [("bundled", 1)]
    assert [(part["bench"], part["workload"]) for part in objects] == [
        ("peers_run", "b1"),
        ("peers", "b1"),
    ]
    table = {line.split("  ")[0]: line.split()[-1] for line in output.splitlines()[2:]}
    assert table["start to first token, s"] == "33.0"
    assert table["peak memory, MiB"] == "99"
    assert "12.5 (12.5 to 12.5)" in output


def test_texts_repeat_their_prompts() -> None:
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


@pytest.mark.thorough("the tests of the others stay, and the speculation it measures has its own")
def test_benchmark_gets_the_texts_of_the_model(
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
