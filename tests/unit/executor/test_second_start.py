"""A process that becomes another one, for real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from executor_service import __main__ as executor_main
from executor_service.config import ExecutorConfig
from executor_service.errors import RecordingFailed

PROGRAM = """
import sys
from executor_service.config import start_again

flags = sys.argv[1:]
if "--second" not in flags:
    start_again(["--second"], "a secret of the cluster" if "--token" in flags else None)
file = [flag.partition("=")[2] for flag in flags if flag.startswith("--cluster-token-file=")]
print([flag for flag in flags if "/dev/fd" not in flag], [open(name).read() for name in file])
print(sys.flags.safe_path, sys.stdin.read())
"""


def _run(path: Path, *flags: str) -> list[str]:
    program = path / "program.py"
    program.write_text(PROGRAM)
    # -P: what was said to the interpreter is said again.
    command = [sys.executable, "-P", str(program), *flags]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        command, input="still open", env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()


def test_process_has_its_flags_and_more_when_it_starts_again(tmp_path: Path) -> None:
    first, second = _run(tmp_path, "--model=x")
    assert first == "['--model=x', '--second'] []"
    assert second == "True still open"


def test_process_has_the_token_of_the_cluster_when_a_pipe_said_it_before(tmp_path: Path) -> None:
    first, _ = _run(tmp_path, "--token")
    assert first == "['--token', '--second'] ['a secret of the cluster']"


def test_executor_starts_again_without_graphs_when_one_could_not_be_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("a secret of the cluster")
    started: list[tuple[list[str], str | None]] = []

    async def serve(_config: ExecutorConfig) -> None:
        raise RecordingFailed("capture was invalidated")

    monkeypatch.setattr(sys, "argv", ["executor", f"--cluster-token-file={tmp_path / 'token'}"])
    monkeypatch.setattr(executor_main, "serve", serve)
    monkeypatch.setattr(
        executor_main, "start_again", lambda flags, token: started.append((flags, token))
    )
    executor_main.main()
    assert started == [(["--cuda-graphs=off"], "a secret of the cluster")]
