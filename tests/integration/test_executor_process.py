"""Tests the executor process: registration, computing, exit codes and messages."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve.executor.v1 import executor_pb2_grpc
from tests.support.fakes.running_schedulers import FakeRegistry, fake_registry
from tests.support.models.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.support.processes.forked import ROOT, SOURCE_ROOTS, run_process
from tests.support.processes.patience import PATIENCE_S
from tests.support.steps.batches import NewRow, Sender, WorkRow, tokens_of


def _start(*options: str) -> subprocess.Popen[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SPLITSERVE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "executor_service", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**environ, "PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in SOURCE_ROOTS)},
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
async def scheduler() -> AsyncIterator[tuple[FakeRegistry, str]]:
    async with fake_registry() as serving:
        yield serving


async def test_executor_registers_computes_and_exits_with_0(
    scheduler: tuple[FakeRegistry, str], model: Path
) -> None:
    servicer, address = scheduler
    process = _start(
        f"--model={model}",
        f"--scheduler={address}",
        "--listen=0.0.0.0:0",
        "--insecure",
        "--num-device-blocks=8",
        "--max-num-seqs=4",
        "--threads=1",
    )
    try:
        info = await servicer.registered.get()
        async with grpc.aio.insecure_channel(info.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest())
            sender = Sender(1, info.executor_epoch)
            call = executor_pb2_grpc.ExecutorServiceStub(channel).Execute()
            await call.write(sender.batch(1, new=[NewRow(0, (0,))], work=[WorkRow(0, 0, [4, 2])]))
            [token] = tokens_of(await call.read())
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (answer.status, 0 <= token < VOCAB_SIZE) == (
        health_pb2.HealthCheckResponse.SERVING,
        True,
    )
    assert (process.returncode, "Traceback" in errors) == (0, False), errors
    assert re.search(r"weights_loaded size='.* KiB' num_files=1 seconds=", errors)
    assert re.search(r"memory_planned device=cpu weights='.*' step='not measured' device", errors)
    # A bar is for terminals only.
    assert "\r" not in errors
    assert (info.num_device_blocks, info.limits.max_num_rows, info.model.name) == (8, 4, "llama")


# It loads for ever, and says so; what Python does as it ends would be said, too.
_LOADS_FOR_EVER = """
import atexit, sys, threading, types
import executor_service.__main__ as process
def load_engine(config, executor_epoch):
    print("loads", file=sys.stderr, flush=True)
    threading.Event().wait()
sys.modules["executor_service.engine_loader"] = types.SimpleNamespace(load_engine=load_engine)
atexit.register(print, "finalized", file=sys.stderr)
sys.exit(process.main())
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_executor_stops_while_it_loads(
    log_format: str,
) -> None:
    # To finalize Python beside a thread in C++ code aborts: "terminate called without an ...".
    process = subprocess.Popen(
        [sys.executable, "-c", _LOADS_FOR_EVER, "--model=bundled", f"--log-format={log_format}"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / r) for r in SOURCE_ROOTS)},
    )
    assert process.stderr is not None
    assert any(re.search(r"\bloads\b", line) for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "executor_stopped" in rest
    assert "finalized" not in rest


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--model={folder}/none",), r".*none: no such directory.*"),
        (
            ("--model={quantised}",),
            r".*: quantised: hqq with 4 bits \(quantization_config\), not served;"
            r" supported: awq, .*",
        ),
        (
            ("--model={model}", "--num-device-blocks=2000000000"),
            r"the device pool does not fit: 2000000000 blocks of \d+ bytes take"
            r" [\d.]+ GiB, \d+ bytes are free on cpu besides the weights \([\d.]+ KiB\);"
            r" lower --num-device-blocks",
        ),
    ],
    ids=["missing", "quantised", "pool"],
)
def test_executor_exits_with_2_when_it_cannot_serve(
    flags: tuple[str, ...], problem: str, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "quantised")
    config = tmp_path / "quantised" / "config.json"
    declared = {"quantization_config": {"quant_method": "hqq", "nbits": 4}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **declared}))
    names = {"folder": tmp_path, "quantised": config.parent, "model": model}

    given = (flag.format_map(names) for flag in flags)
    done = run_process("executor_service", *given, "--log-level=error")

    assert done.returncode == 2
    assert re.fullmatch(rf"splitserve executor: {problem}\n", done.stderr)


def test_executor_exits_with_1_when_the_port_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"--listen=127.0.0.1:{taken.getsockname()[1]}"
        done = run_process("executor_service", "--model=/nowhere", address)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "splitserve executor: cannot listen on" in done.stderr
