"""API keys of commands: files, environment, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve_cli.main import main
from splitserve_cli.serve_config import ServeConfig
from splitserve_cli.welcome import welcome
from splitserve_rpc import Access, ServerSecurity
from tests.support.fakes.running_schedulers import FakeServer
from tests.support.processes.patience import PATIENCE_S
from tests.support.security.credentials import OneKey

KEY = "sk-ss-a1-the-secret-of-alice"
COMMANDS = [["generate", "--max-tokens=2", "t1"], ["info"]]


@pytest.fixture
def knowing() -> Iterator[FakeServer]:
    """Knows `KEY`."""
    server = FakeServer(ServerSecurity(OneKey(KEY)))
    yield server
    server.close()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_takes_the_key_of_file_or_environment(
    command: list[str],
    knowing: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [*command, "--address", knowing.address]
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert main(argv) == 1
    assert capsys.readouterr().err.endswith("[CALLER_UNKNOWN]\n")
    assert main([*argv, "--api-key-file", str(file)]) == 0
    monkeypatch.setenv("SPLITSERVE_API_KEY", KEY)
    assert main(argv) == 0
    # The file wins.
    monkeypatch.setenv("SPLITSERVE_API_KEY", "sk-ss-a1-wrong")
    monkeypatch.setenv("SPLITSERVE_API_KEY_FILE", str(file))
    assert main(argv) == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flags", [["--api-key", KEY], [f"--api-key={KEY}"]])
def test_command_refuses_a_key_on_its_line(
    command: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, *flags])
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert "--api-key-file FILE, or set SPLITSERVE_API_KEY" in shown.err
    assert KEY not in shown.err + shown.out


@pytest.mark.parametrize("command", COMMANDS)
def test_command_fails_in_one_line_when_key_unusable(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY} {KEY}")
    assert main([*command, "--api-key-file", str(file)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"splitserve {command[0]}: {file}: is not a credential")
    assert KEY not in shown


@pytest.mark.parametrize("with_demo", [False, True])
async def test_welcome_needs_no_more_than_callers_do(
    with_demo: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPLITSERVE_API_KEY", KEY)
    # A key that may generate, and is for no operator.
    server = FakeServer(ServerSecurity(Access(scopes_of=lambda credential: {"generate"})))
    try:
        config = ServeConfig(server.address, None, "model", with_demo, 1.0, time.monotonic())
        await welcome(config)
    finally:
        server.close()
    shown = capsys.readouterr()
    assert shown.err == ""
    assert " s: fake, float32\n" in shown.out
    assert len(server.fake.requests) == with_demo


@pytest.mark.parametrize(
    ("with_demo", "failed"), [(True, "first completion"), (False, "query of the model")]
)
async def test_welcome_says_what_a_wrong_key_was_needed_for(
    with_demo: bool,
    failed: str,
    knowing: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SPLITSERVE_API_KEY", "sk-ss-a1-wrong")
    await welcome(ServeConfig(knowing.address, None, "model", with_demo, 1.0, time.monotonic()))
    shown = capsys.readouterr()
    assert shown.err == f"splitserve serve: {failed} failed: the credential is not valid\n"
    assert "splitserve is ready" in shown.out


def test_command_warns_of_a_key_in_plain_text() -> None:
    # An address that is not of loopback, and that is this machine all the same.
    argv = [sys.executable, "-m", "splitserve_cli", "info", "--address", "0.0.0.0:1"]
    environment = {**os.environ, "SPLITSERVE_API_KEY": KEY}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    warning, *_ = done.stderr.splitlines()
    assert warning.startswith("credential_in_plain_text address=0.0.0.0:1")
    assert done.stderr.count("credential_in_plain_text") == 1
    assert KEY not in done.stderr
