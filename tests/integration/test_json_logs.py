"""Tests that what processes write with `--log-format json` is JSON to the last line."""

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
from tests.support.processes.forked import run_process
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


@pytest.mark.thorough("a real stack; tests/unit/rpc/test_process_log.py has what each line is")
def test_every_line_of_a_served_stack_is_json(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("program", "flags", "code", "why"),
    [
        ("executor_service", ("--model=/nowhere",), 2, "/nowhere"),
        ("executor_service", ("--metrics-listen={taken}",), 1, "cannot listen on {taken}"),
        (
            "scheduler_service",
            ("--cluster-listen=127.0.0.1:0", "--metrics-listen={taken}"),
            1,
            "cannot listen on {taken}",
        ),
    ],
)
def test_process_says_in_json_why_it_cannot_start(
    program: str, flags: tuple[str, ...], code: int, why: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        given = (flag.format(taken=taken) for flag in flags)
        ended = run_process(program, "--listen=127.0.0.1:0", "--log-format=json", *given)

    assert ended.returncode == code
    *_, line = (json.loads(line) for line in ended.stderr.splitlines())
    assert (line["level"], line["event"]) == ("CRITICAL", "start_failed")
    assert why.format(taken=taken) in line["fields"]["why"]
