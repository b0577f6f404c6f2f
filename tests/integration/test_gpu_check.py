"""`make gpu-check` without a GPU: all of it runs, and what fails costs no more than itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_check import wheels
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.aims import LLAMA_8B_DECODES, START_S, Aim, Bound
from benchmarks.gpu_check.backends import FLASH_ATTENTION_3, all_backends
from benchmarks.gpu_check.cases import Case, Schedule, run_cases
from benchmarks.gpu_check.machine import FLASH_ATTENTION_3_REFUSED, Rates
from benchmarks.gpu_check.part_process import (
    FLASH_ATTENTION_3_FROM,
    GRACE_S,
    run_part_apart,
    work_place,
)
from benchmarks.gpu_check.parts import PARTS, wanted_parts
from benchmarks.gpu_check.results import SKIPPED, Measurement, ResultFile, print_summary
from splitserve_options import resolve

ROOT = Path(__file__).parents[2]
README = ROOT / "benchmarks" / "gpu_check" / "README.md"
CPU = torch.device("cpu")
PART = PARTS[0]
# A process that does as it is told by `--after`, and adds to the file in the environment.
CHILD = """
import json, os, signal, sys, time
after = sys.argv[sys.argv.index("--after") + 1] if "--after" in sys.argv else None
def add(entry):
    with open(os.environ["RESULTS"], "a") as file:
        file.write(json.dumps({"part": "env", **entry}) + "\\n")
def measured(name):
    add({"name": name, "value": 1, "unit": "", "aim": "", "is_met": None, "note": ""})
if after is None:
    add({"began": "first"})
    measured("first")
    add({"began": "second"})
    os.kill(os.getpid(), signal.SIGKILL)
if after == "second":
    add({"began": "third"})
    sys.exit(3)
add({"began": "fourth"})
measured("fourth")
if "HANG" in os.environ:
    time.sleep(600)
"""


@pytest.fixture
def results(tmp_path: Path) -> ResultFile:
    file = ResultFile(tmp_path / "results.jsonl")
    file.describe({"device": "none"})
    return file


def found(file: ResultFile) -> list[tuple[str, object]]:
    return [(line["name"], line["value"]) for line in file.measurements()]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "there is no CUDA device here (or torch has no CUDA)\n"),
        (("--only", "decode", "nonsense"), "nonsense: there is no such part; allowed: env, corr"),
        (("--fa3", "/no.so"), "--fa3 /no.so: there is no such file; allowed: a library, or hub\n"),
    ],
)
def test_gpu_check_ends_with_2_when_it_cannot_run(
    arguments: tuple[str, ...],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    out, errors = capfd.readouterr()
    assert (out, problem in errors, errors.count("\n")) == ("", True, 1)
    assert list(tmp_path.iterdir()) == []


def test_gpu_check_refuses_an_unusable_flash_attention_3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fa3.so").touch()
    machine = {"device": "a GPU", FLASH_ATTENTION_3_REFUSED: "it registers no operator fwd"}

    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], returncode=0, stdout=json.dumps(machine))

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "out"
    assert main(["--fa3", str(tmp_path / "fa3.so"), "--out", str(out)]) == 2
    assert capfd.readouterr()[1] == (
        f"gpu-check: --fa3 {tmp_path / 'fa3.so'}: it registers no operator fwd\n"
    )
    assert not out.exists()


@pytest.mark.parametrize("name", ["fa3.so", "hub"])
def test_flash_attention_3_is_passed_to_executors(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "fa3.so").touch()
    monkeypatch.chdir(tmp_path)
    environments: list[dict[str, str]] = []

    def run(*_: object, env: dict[str, str], **__: object) -> subprocess.CompletedProcess[str]:
        environments.append(env)
        return subprocess.CompletedProcess([], returncode=2, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["--fa3", name]) == 2
    (environment,) = environments
    expected = name if name == "hub" else str(tmp_path / name)
    assert resolve("executor", ["--model", "m"], environment)["flash_attn_3_from"] == expected

    monkeypatch.setenv(FLASH_ATTENTION_3_FROM, environment[FLASH_ATTENTION_3_FROM])
    flash_attention_3 = next(each for each in all_backends() if each.name == FLASH_ATTENTION_3)
    assert flash_attention_3.is_asked_for


@pytest.mark.thorough(
    "all parts, interpreted: a minute; tests/kernels/gpu, and all else here, stay"
)
def test_gpu_check_runs_every_part(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    # A server is a start of both processes; `make gpu-check ARGS=--smoke` has it, too.
    parts = [part.name for part in wanted_parts(None, is_smoke=True) if "server" not in part.name]
    # Triton and the log are set for the whole process.
    result = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu_check", "--smoke", "--out", str(tmp_path)),
            *("--commit", "of a test", "--only", *parts),
        ],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = tmp_path.iterdir()
    machine, *entries = ResultFile(path).entries()
    assert {"date", "device", "packages", "tools", "cuda"} <= machine.keys()
    assert machine["commit"] == "of a test"
    assert {entry["part"] for entry in entries} == set(parts)
    # `tests` would run itself, a CPU records nothing, and no tile of its is worth a change.
    assert {entry["part"] for entry in entries if "began" in entry} == set(parts) - {
        "tests", "broken", "tiles",
    }  # fmt: skip
    lines = ResultFile(path).measurements()
    assert [line for line in lines if line["is_met"] is False] == []
    names = [(line["part"], line["name"]) for line in lines]
    assert len(set(names)) == len(names)


def test_readme_has_every_part_and_every_finding() -> None:
    text = README.read_text(encoding="utf-8")
    named = re.findall(r"[\w-]+", " ".join(re.findall(r"`([^`\n]+)`", text)))
    assert [part.name for part in PARTS if part.name not in named] == []
    assert re.findall(r"^\| F(\d+) ", text, re.MULTILINE) == [str(n) for n in range(1, 19)]


def test_calls_of_the_readme_fit_their_time_and_name_parts() -> None:
    calls = re.findall(
        r"^\| \d\. `--total-s (\d+) --only ([\w -]+)` .* (\d+) s \|$", README.read_text(), re.M
    )
    assert len(calls) == 4
    for total_s, names, estimate_s in calls:
        assert int(total_s) <= 520
        seconds = sum(part.seconds for part in wanted_parts(names.split()))
        assert seconds == int(estimate_s)
        assert seconds + GRACE_S <= int(total_s)


def test_gpu_check_begins_no_part_that_could_go_on_beyond_the_total(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--smoke", "--only", "env", "--total-s", str(GRACE_S), "--out", str(tmp_path)]
    assert main(flags) == 0
    (path,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert SKIPPED in {line.get("value") for line in lines}
    assert not any("began" in line for line in lines)
    assert capfd.readouterr()[1] == ""


@pytest.mark.parametrize(
    ("gib_free", "variables", "is_memory"),
    [(24, {}, True), (23, {}, False), (24, {"TMPDIR": "/elsewhere"}, False)],
)
def test_checkpoints_go_to_memory_if_they_fit(
    gib_free: int,
    variables: dict[str, str],
    is_memory: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    usage = SimpleNamespace(free=gib_free * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    assert work_place(tmp_path) == (tmp_path if is_memory else None)
    assert work_place(tmp_path / "missing") is None


def test_wheels_are_pinned_and_counted_before_they_are_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "library.so").write_bytes(b"0" * 2**20)
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        (tmp_path / "a.whl").write_bytes(b"0" * 2**20)
        return subprocess.CompletedProcess(command, returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    flags = [str(tmp_path), "--also", str(tmp_path / "library.so"), "--max-mib"]
    assert [wheels.main([*flags, most]) for most in ("2", "1.9")] == [0, 1]
    assert capsys.readouterr()[0] == "2 files, 2.0 of 2 MiB\n2 files, 2.0 of 1.9 MiB\n"
    pins = [word for word in commands[0] if "==" in word]
    assert len(pins) == len(wheels.WHEELS)
    assert set(pins) <= set((ROOT / "constraints.txt").read_text().splitlines())
    with pytest.raises(ValueError, match=r"constraints.txt has no version of nonsense"):
        wheels.pinned("grpcio==1\n", ("nonsense",))


def test_failed_case_costs_no_other(results: ResultFile) -> None:
    def fails() -> Iterator[Measurement]:
        yield Measurement("before", 1.0)
        raise ValueError("said by the case")

    cases = [
        Case("fails", 1, fails),
        Case("too long", 10**9, lambda: [Measurement("never", 1.0)]),
        Case("fits", 1, lambda: [Measurement("fits", 2.0)]),
    ]
    run_cases("decode", iter(cases), Schedule(time.monotonic() + 10**6), results, CPU)

    assert found(results) == [
        ("before", 1.0),
        ("fails: failed", "ValueError: said by the case"),
        ("too long", "skipped"),
        ("fits", 2.0),
    ]
    assert print_summary(results) == 1


def test_cases_that_another_process_tried_are_not_tried_again(results: ResultFile) -> None:
    cases = [Case(name, 1, lambda: [Measurement("found", 1.0)]) for name in ("a", "b", "c")]
    schedule = Schedule(time.monotonic() + 10**6, after="b")
    run_cases("decode", iter(cases), schedule, results, CPU)
    assert [entry["began"] for entry in results.entries() if "began" in entry] == ["c"]


def test_a_process_that_dies_costs_one_case(results: ResultFile) -> None:
    environment = {**os.environ, "RESULTS": str(results.path)}
    command = [sys.executable, "-c", CHILD]
    run_part_apart(PART, command, time.monotonic() + 10**6, results, environment)
    assert found(results) == [
        ("first", 1),
        ("second: failed", "ended by SIGKILL"),
        ("third: failed", "the device was lost"),
        ("fourth", 1),
    ]


def test_a_process_that_hangs_is_killed_when_its_time_is_over(results: ResultFile) -> None:
    # It is at its fourth case, or not yet: its time is over at once.
    environment = {**os.environ, "RESULTS": str(results.path), "HANG": "1"}
    command = [sys.executable, "-c", CHILD, "--after", "third"]
    run_part_apart(PART, command, time.monotonic() + 0.2, results, environment, grace_s=0.2)
    assert found(results)[-1][1] in ("the time was over", "skipped")
    assert "the time was over" in [value for _, value in found(results)]


def test_aims_are_lower_where_the_device_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu_check import aims

    half = Rates(bandwidth=4.3e12 / 2, flops=790e12)
    monkeypatch.setattr(aims, "rates_of", lambda _sizes: half)
    sizes: object = object()
    assert LLAMA_8B_DECODES[1].here(sizes) == pytest.approx(110)  # type: ignore[arg-type]
    assert Aim(400, Bound.ARITHMETIC).here(sizes) == 400  # type: ignore[arg-type]
    assert START_S.here(sizes) == 60  # type: ignore[arg-type]
