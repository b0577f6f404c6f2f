"""The command as a whole: help, refusals, Ctrl-C, extras, imports."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from splitserve_cli.extras import MODULES
from splitserve_cli.main import main
from tests.support.fakes.running_schedulers import FakeServer
from tests.support.processes.forked import children_take_sigint
from tests.support.processes.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:1"])
@pytest.mark.parametrize("command", ["generate", "info"])
def test_command_is_one_line_and_1_when_no_server_answers(
    address: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["t1"] if command == "generate" else []

    assert main([command, "--address", address, *prompt]) == 1

    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith(
        f"splitserve {command}: cannot connect to {address} in plain text: "
    )


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tls-cert=/nowhere"], "--tls-cert is given without --tls-key"),
        (["--tls-key=/nowhere"], "--tls-key is given without --tls-cert"),
        (["--tls-ca=/nowhere"], "/nowhere: No such file or directory"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "t1"], ["info"]])
def test_command_fails_in_one_line_when_tls_unusable(
    command: list[str], flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *flags]) == 1
    assert capsys.readouterr().err == f"splitserve {command[0]}: {problem}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "--stream", "x"], "--stream needs --json"),
        (["generate", "--file=/nowhere", "x"], "give PROMPT or --file, not both"),
        (["generate", "--file=/nowhere"], "No such file"),
        (["generate", "--timeout=0", "x"], "is not above 0"),
        (["generate", "--max-tokens=99999999999", "x"], "invalid integer value"),
        (["generate", "--logit-bias=5", "x"], "invalid ID=X value"),
        (["generate", "--allowed-token-ids=", "x"], "invalid ID,ID,... value"),
        (["generate", "--allowed-token-ids=5,x", "x"], "invalid ID,ID,... value"),
        (["generate", "--length-penalty=1", "x"], "--length-penalty needs --beam-width"),
        (["generate", "--early-stopping=never", "x"], "--early-stopping needs --beam-width"),
        (["generate", "--early-stopping=soon", "--beam-width=2", "x"], "invalid choice: 'soon'"),
        (["generate", "--deadline-s=0", "x"], "--deadline-s: 0 is out of range"),
        (["generate", "--deadline-s=nan", "x"], "--deadline-s: nan is out of range"),
        (["generate", "--priority=x", "x"], "invalid integer value"),
        (["generate", "--regex=x", "--choice=y", "x"], "--regex"),
        (
            ["generate", "--token-ids=1", "a text"],
            "give only one of --token-ids, PROMPT and --file",
        ),
        (
            ["generate", "--token-ids=1", "--file=x"],
            "give only one of --token-ids, PROMPT and --file",
        ),
        (["generate", "--token-ids="], "--token-ids is empty"),
        (["generate", "--token-ids=1", "--bad-words=x"], "--bad-words needs a tokenizer"),
        (["generate", "--token-ids=one"], "argument --token-ids: invalid"),
        (["generate", "--token-ids=2147483648"], "argument --token-ids: invalid"),
        (["serve", "--block-size=0"], "0 is invalid"),
    ],
)
def test_command_exits_with_2_when_arguments_are_bad(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 2, "usage: splitserve"),
        (["genrate"], 2, "unknown command 'genrate'; did you mean 'generate'?"),
        (["x"], 2, "unknown command 'x'; see splitserve --help"),
    ],
)
def test_splitserve_explains_itself_when_the_command_is_unknown(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--help"], [], ["--no-such-option"]])
@pytest.mark.parametrize(("command", "module"), [("gateway", "uvicorn"), ("executor", "torch")])
def test_process_fails_in_one_line_when_extra_missing(
    command: str,
    module: str,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it could not be imported

    assert main([command, *options]) == 2

    captured = capsys.readouterr()
    expected = f"splitserve {command}: needs {module}: pip install 'splitserve[{command}]'\n"
    assert (captured.out, captured.err) == ("", expected)


@pytest.mark.parametrize("extra", list(MODULES))
def test_modules_of_an_extra_are_those_of_its_packages(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = map(Requirement, project["optional-dependencies"][extra])
    assert sorted(MODULES[extra]) == sorted(each.name.replace("-", "_") for each in packages)


def test_splitserve_lists_commands_when_asked_for_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0

    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in ("serve", "generate", "info", "executor"))


def test_generate_aborts_and_exits_with_130_when_interrupted(server: FakeServer) -> None:
    def before_token(number: int) -> None:
        if number == 2:
            server.fake.hold = asyncio.Event()

    server.fake.before_token = before_token
    command = [
        sys.executable, "-m", "splitserve_cli", "generate", "--address", server.address,
        "--max-tokens=100", "t1",
    ]  # fmt: skip
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with children_take_sigint():
        started = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
        )
    with started as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(2)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr.read() == b""

    server.run(asyncio.wait_for(server.fake.ended.wait(), PATIENCE_S))


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("splitserve_cli.main", ["numpy", "grpc", "httpx2", "splitserve_bench"]),
        ("splitserve_cli.serve", ["grpc", "tokenizers", "jinja2", "torch"]),
    ],
)
def test_command_line_starts_without_what_only_some_commands_need(
    module: str, heavy: list[str]
) -> None:
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, check=True, text=True
    )

    assert done.stdout.strip() == "[]"
