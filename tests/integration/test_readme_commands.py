"""Runs the first command of README.md; the second one is what CI runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import ROOT
from tests.support.processes.patience import PATIENCE_S


def top_commands() -> list[str]:
    """The commands of the first block of code in README.md, without their comments."""
    block = re.search(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block is not None
    return [line.partition("#")[0].strip() for line in block[1].splitlines()]


def test_readme_names_the_command_that_ci_runs() -> None:
    serve, test = top_commands()

    assert (serve, test) == ("make serve", "make test")
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == f"{test} TIER=all"


def run_until(command: list[str], expected: str, where: Path, environment: dict[str, str]) -> str:
    """Runs a command until it prints `expected`, then presses Ctrl-C; returns what it printed."""
    printed = ""
    with subprocess.Popen(
        command,
        cwd=where,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                printed += line
                if expected in line:
                    os.killpg(process.pid, signal.SIGINT)
                    expected = "\0"
            process.wait(PATIENCE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return printed


@pytest.mark.thorough("tests/integration/test_serve_cli.py serves by `splitserve serve`")
@pytest.mark.skipif(not (ROOT / ".venv/.ready").exists(), reason="the tests run without .venv")
def test_first_command_serves_a_model(tmp_path: Path) -> None:
    """CI runs in a fresh clone, where the second command has just installed everything."""
    serve, _ = top_commands()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    # With an empty cache it would compile the native kernels, which tests/kernels/cpu does.
    environment["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    # Other servers may run on this machine.
    addresses = {
        f"SPLITSERVE_{name}": reserve_address() for name in ("LISTEN", "HTTP", "LIVE_LISTEN")
    }

    printed = run_until(serve.split(), "Ctrl-C stops the server", ROOT, environment | addresses)

    assert "dragon" in printed, printed
    assert "Traceback" not in printed, printed
