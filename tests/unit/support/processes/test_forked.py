"""Tests processes that are forked instead of executed."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.support.processes.forked import ROOT, SOURCE_ROOTS, run_process, start_process
from tests.support.processes.patience import PATIENCE_S

# Runs until it is told to stop, or its standard input ends.
_OPTIONS = ("--exit-on-stdin-eof", "--listen=127.0.0.1:0", "--cluster-listen=127.0.0.1:0")
_MAIN = f"""
import subprocess
from tests.support.processes.forked import start_process
process = start_process("scheduler_service", {_OPTIONS}, stdin=subprocess.PIPE)
print(process.pid, flush=True)
process.wait()
"""


def test_process_has_the_environment_of_its_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_QUEUE_POLICY", "lifo")

    done = run_process("scheduler_service", SPLITSERVE_BATCH_POLICY="greedy")

    assert done.returncode == 2
    assert done.stderr.startswith("splitserve scheduler: SPLITSERVE_BATCH_POLICY (environment)")


def test_process_sees_the_end_of_its_input_while_others_run() -> None:
    first, second = (
        start_process("scheduler_service", _OPTIONS, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    )

    _, said = first.communicate()

    assert (first.returncode, second.poll()) == (0, None)
    assert said is not None
    assert b"scheduler_stopped" in said
    second.kill()
    second.communicate()


def test_no_process_is_left_when_the_tests_are_killed() -> None:
    paths = os.pathsep.join(str(ROOT / part) for part in SOURCE_ROOTS)
    with subprocess.Popen(
        [sys.executable, "-c", _MAIN],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
    ) as tests:
        assert tests.stdout is not None
        left = [psutil.Process(int(tests.stdout.readline()))]
        left += psutil.Process(tests.pid).children()
        assert len(left) == 2

        tests.kill()

        _, alive = psutil.wait_procs(left, timeout=PATIENCE_S)
    assert alive == []
