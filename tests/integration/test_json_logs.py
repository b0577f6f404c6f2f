"""What real processes write with `--log-format json` is JSON to the last line."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.test_serve_cli import environ
from tests.support.processes.addresses import reserve_address
from tests.support.processes.patience import PATIENCE_S

PROMPT = "words that no log may have"
KEYS = {"time", "level", "logger", "message"}
PAUSE_S = 0.05
JSON = ("--log-format", "json", "--log-level", "info", "--threads", "1")


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def wait_for_event(log: Path, event: str, number: int = 1) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while log.read_text().count(f'"event": "{event}"') < number:
        assert time.monotonic() < deadline, f"no {event} in:\n{log.read_text()}"
        time.sleep(PAUSE_S)


def test_every_line_of_a_served_stack_is_json_when_an_executor_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    http = reserve_address()
    flags = ["--listen", reserve_address(), "--http", http, "--num-device-blocks", "128"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "splitserve_cli", "serve", *flags, "--no-demo", *JSON],
            env=environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        wait_for_event(log, "upstream_ready")
        body = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()
        asked = urllib.request.Request(
            f"http://{http}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            assert answer.status == 200
        executor = next(
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "executor_service" in child.cmdline()
        )
        executor.kill()
        wait_for_event(log, "executor_joined", 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()

    lines = lines_of(log)
    assert all(line.keys() >= KEYS for line in lines)
    events = {line.get("event") for line in lines}
    assert events >= {"scheduler_started", "model_loaded", "gateway_serving", "executor_lost"}
    (lost,) = (line for line in lines if line.get("event") == "executor_lost")
    assert lost["fields"]["num_requests"] == 0
    assert any("ended (killed by SIGKILL)" in line["message"] for line in lines)
    assert PROMPT not in log.read_text()


def test_what_grpc_says_itself_is_json() -> None:
    # Its core, which is native code, then tells standard error of each call of its API.
    talkative = {"GRPC_VERBOSITY": "DEBUG", "GRPC_TRACE": "api"}
    program = """
from splitserve_rpc.process_log import start_logging
start_logging("info", "json")
import grpc
grpc.insecure_channel("127.0.0.1:1").close()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environ() | talkative,
        capture_output=True,
        text=True,
        check=True,
    )

    # The last it says when Python has ended, and nobody reads it any more.
    said = [line for line in ended.stderr.splitlines() if "grpc_shutdown" not in line]
    lines = [json.loads(line) for line in said]
    assert lines
    assert {line["logger"] for line in lines} == {"stderr"}


def test_why_a_process_cannot_start_is_json(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    ended = subprocess.run(
        [sys.executable, "-m", "splitserve_cli", "executor", *JSON, "--model", str(missing)],
        env=environ(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 2
    *_, why = (json.loads(line) for line in ended.stderr.splitlines())
    assert (why["level"], why["event"]) == ("CRITICAL", "start_failed")
    assert str(missing) in why["fields"]["why"]


@pytest.mark.parametrize("program", ["scheduler_service", "executor_service"])
def test_a_process_says_one_thing_when_the_address_of_its_metrics_is_taken(program: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--listen", "127.0.0.1:0", "--metrics-listen", address, "--log-format", "json"]
        ended = subprocess.run(
            [sys.executable, "-m", program, *flags],
            env=environ(),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )

    (line,) = (json.loads(line) for line in ended.stderr.splitlines())
    assert ended.returncode == 1
    assert line["event"] == "start_failed"
    assert f"cannot listen on {address}" in line["fields"]["why"]
