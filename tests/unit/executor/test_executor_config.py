"""The configuration of an executor, and the start of a process that becomes another one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from executor_service import __main__ as executor_main
from executor_service.config import ExecutorConfig
from executor_service.errors import RecordingFailed
from executor_service.quantization import ROUNDINGS
from splitserve_options import SECURITY_OPTIONS, options


def test_config_has_a_field_for_each_option_when_they_are_parsed() -> None:
    values = options.resolve("executor", ["--max-num-seqs=3"], {})
    config = ExecutorConfig.from_options(values)
    assert (config.block_size, config.max_num_seqs) == (None, 3)
    of_security = {option.key for option in SECURITY_OPTIONS}
    named = {field.name for field in fields(config)} - {"security", "metrics"}
    of_metrics = {"metrics_listen", "allowed_hosts"}
    assert named == values.keys() - of_security - of_metrics - {"log_format", "log_level"}


def test_option_quantization_has_all_roundings() -> None:
    option = next(each for each in options.options_of("executor") if each.key == "quantization")
    assert option.choices == ("none", "int8", *ROUNDINGS)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--model", " "),
        ("--dtype", "int8"),
        ("--task", "rank"),
        ("--kv-cache-dtype", "fp16"),
        ("--device", "tpu"),
        ("--attention-backend", "fast"),
        ("--quantization", "int2"),
        ("--cuda-graphs", "on"),
        ("--block-size", 0),
        ("--block-size", 257),
        ("--num-device-blocks", -1),
        ("--memory-fraction", 0.0),
        ("--memory-fraction", float("nan")),
        ("--num-host-blocks", -1),
        ("--max-num-seqs", 2**31),
        ("--max-model-len", 1),
        ("--threads", 0),
        ("--listen", "50051"),
        ("--scheduler", "host:99999"),
        ("--advertise-address", "host"),
        ("--log-level", "loud"),
    ],
)
def test_options_name_flag_value_and_range_when_it_is_invalid(flag: str, value: object) -> None:
    option = next(option for option in options.options_of("executor") if option.flag == flag)
    with pytest.raises(options.OptionError) as caught:
        options.resolve("executor", [f"{flag}={value}"], {})
    refusal = f"{flag} (flag): {value!r} is invalid; allowed: {option.allowed}"
    assert str(caught.value) == refusal


def test_options_are_refused_when_two_pool_sizes_are_given() -> None:
    flags = ["--num-device-blocks=1", "--memory-fraction=0.5"]
    with pytest.raises(options.OptionError, match="exclude each other"):
        options.resolve("executor", flags, {})


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


def _run_program(path: Path, *flags: str) -> list[str]:
    program = path / "program.py"
    program.write_text(PROGRAM)
    # -P: what was said to the interpreter is said again.
    command = [sys.executable, "-P", str(program), *flags]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        command, input="still open", env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("flag", "token"), [("--model=x", []), ("--token", ["a secret of the cluster"])]
)
def test_process_keeps_flags_token_and_input_when_it_starts_again(
    tmp_path: Path, flag: str, token: list[str]
) -> None:
    """The token of the cluster, which a pipe said before, is said by another one."""
    first, second = _run_program(tmp_path, flag)
    assert first == f"{[flag, '--second']} {token}"
    assert second == "True still open"


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
