"""Tests `splitserve bench` as a process, and one load that several processes share."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.bench.targets import AnsweringServer, answering_server
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch, fake_service
from tests.support.processes.forked import children_take_sigint, run_process
from tests.support.processes.patience import PATIENCE_S

NUM_PROCESSES = 3
LOAD = ("--prompt-tokens=uniform:3:30", "--output-tokens=uniform:2:9", "--prompt-seed=5", "--quiet")


def asked_by(tmp_path: Path, *flags: str) -> tuple[Counter[str], dict[str, Any]]:
    """What the server was asked, without probes, and the report."""
    path = tmp_path / "report.json"
    with answering_server() as server:
        done = run_process("splitserve_bench", server.url, *LOAD, *flags, f"--json={path}")
        bodies = Counter(json.dumps(body, sort_keys=True) for body in server.bodies)
    assert (done.returncode, done.stderr) == (0, "")
    (target,) = json.loads(path.read_text())["targets"]
    probes = [body for body, count in bodies.items() if json.loads(body)["max_tokens"] == 2]
    # A probe is what each process asks, so it is no load that was drawn.
    (probe,) = [body for body in probes if len(json.loads(body)["prompt"]) == 8][:1]
    del bodies[probe]
    return bodies, target


@pytest.mark.cases(1)
@pytest.mark.parametrize("pace", ["--rate=400", "--concurrency=7"])
def test_processes_together_ask_exactly_what_one_asks(pace: str, tmp_path: Path) -> None:
    flags = (pace, "--requests=100", "--rounds=2")

    alone, report_of_one = asked_by(tmp_path, *flags)
    together, report = asked_by(tmp_path, *flags, f"--processes={NUM_PROCESSES}")

    assert together == alone
    assert sum(alone.values()) == 200
    assert report["requests"] == report_of_one["requests"]
    assert report["requests"]["num_completed"] == 200
    # Each request once, and in both rounds.
    for metric in ("ttft", "e2e", "send_delay"):
        counts = [each["latency_s"][metric]["count"] for each in (report, report_of_one)]
        assert counts[0] == counts[1]
    assert [sum(each["num_sent"]) for each in report["timelines"]] == [100, 100]
    assert len(report["parts"]["ttft"]) == len(report_of_one["parts"]["ttft"])
    assert report["generator_busy_ratio"] > 0


@contextmanager
def held_run(
    server: AnsweringServer, num_answered: int
) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A run whose first requests are answered and whose others wait, with its processes."""
    num_probes = NUM_PROCESSES
    server.hold(num_probes + num_answered + 1)
    with (
        children_take_sigint(),
        subprocess.Popen(
            [
                *(sys.executable, "-m", "splitserve_bench", server.url, *LOAD),
                *("--concurrency=6", "--requests=1000", f"--processes={NUM_PROCESSES}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        ) as process,
    ):
        try:
            # When six wait, all else has been answered.
            server.wait_for(num_probes + num_answered + 6)
            children = psutil.Process(process.pid).children()
            assert len(children) == NUM_PROCESSES
            yield process, children
        finally:
            process.kill()


def test_interrupt_ends_all_processes_and_reports_what_was_answered() -> None:
    with answering_server() as server, held_run(server, 40) as (process, children):
        process.send_signal(signal.SIGINT)
        said, problems = process.communicate(timeout=PATIENCE_S)
        _, alive = psutil.wait_procs(children, PATIENCE_S)

    assert (process.returncode, problems, alive) == (130, b"", [])
    assert b"40 completed, 0 failed" in said


def test_run_fails_and_says_which_process_died() -> None:
    with answering_server() as server, held_run(server, 40) as (process, children):
        children[1].kill()
        said, problems = process.communicate(timeout=PATIENCE_S)
        _, alive = psutil.wait_procs(children, PATIENCE_S)

    assert (process.returncode, said, alive) == (1, b"", [])
    assert b" of 3 ended during the run (exit code -9)" in problems


def test_processes_end_when_the_one_that_began_them_is_killed() -> None:
    with answering_server() as server, held_run(server, 40) as (process, children):
        process.kill()
        _, alive = psutil.wait_procs(children, PATIENCE_S)

    assert alive == []


def test_problem_of_a_process_is_said_once(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    good = {"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]}
    bad = good | {"input_length": "many"}
    trace.write_text("\n".join(map(json.dumps, [good, good, bad])))
    with answering_server() as server:
        done = run_process("splitserve_bench", server.url, f"--trace={trace}", "--processes=2")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"splitserve bench: {trace}:3: input_length is 'many'; allowed: a number of tokens\n"
    )


async def test_interrupt_reports_what_a_scheduler_answered() -> None:
    watch = StepWatch()
    async with fake_service(FakeExecutor(fault=watch)) as service:
        watch.hold(after=40)
        with children_take_sigint():
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "splitserve_bench", service.scheduler.address),
                *("--concurrency=1", "--requests=100", "--prompt-tokens=4", "--quiet"),
                *("--output-tokens=4", "--token-range=1:20"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        await watch.wait_held()
        process.send_signal(signal.SIGINT)
        said, problems = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        watch.release()

    assert (process.returncode, problems) == (130, b"")
    # Of 40 steps at most: each request takes four, and a probe came first.
    num_completed = int(said.decode().split("requests    ")[1].split()[0])
    assert 1 <= num_completed <= 10
    assert b"0 failed" in said
