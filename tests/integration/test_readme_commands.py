"""Runs the two commands at the top of README.md in a fresh clone."""

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

_INSTALLING_S = 900


def top_commands() -> list[str]:
    """The commands of the first block of code in README.md, without their comments."""
    block = re.search(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block is not None
    return [line.partition("#")[0].strip() for line in block[1].splitlines()]


def test_readme_names_the_command_that_ci_runs() -> None:
    serve, test = top_commands()

    assert (serve, test) == ("make serve", "make test")
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == f"{test} TIER=all"


@pytest.fixture
def newcomer(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A fresh clone, and an environment that has only what a package index needs."""
    clone, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    command = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    for name, path in (
        ("PIP_CONFIG_FILE", ".config/pip/pip.conf"),
        ("NPM_CONFIG_USERCONFIG", ".npmrc"),
    ):
        if (settings := Path.home() / path).exists():
            environment[name] = str(settings)
    kept = (
        "PIP_",
        "NPM_CONFIG_",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "SSL_CERT",
        "NODE_EXTRA",
    )
    environment |= {name: value for name, value in os.environ.items() if name.startswith(kept)}
    return clone, environment


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


@pytest.mark.thorough("it installs everything anew; CI itself runs `make test` in a fresh clone")
@pytest.mark.timeout(2 * _INSTALLING_S)
def test_both_commands_work_when_a_newcomer_types_them(
    newcomer: tuple[Path, dict[str, str]],
) -> None:
    clone, environment = newcomer
    serve, test = (command.split() for command in top_commands())
    # Other servers may run on this machine.
    free = {name: reserve_address() for name in ("LISTEN", "HTTP", "LIVE_LISTEN")}
    addresses = {f"SPLITSERVE_{name}": address for name, address in free.items()}

    printed = run_until(serve, "Ctrl-C stops the server", clone, environment | addresses)

    if "No matching distribution" in printed or "Could not find a version" in printed:
        pytest.skip("no package index can be reached")
    assert "dragon" in printed, printed
    assert "Traceback" not in printed, printed
    # The tests of one folder stand for all of them, which CI runs by this command.
    tested = subprocess.run(
        [*test, "TESTS=tests/unit/rpc"],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_INSTALLING_S,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert re.search(r"\d+ passed", tested.stdout), tested.stdout
