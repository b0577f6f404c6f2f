from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from splitserve_cli.serve_config import ServeConfig
from splitserve_cli.supervisor import Child, Supervisor, describe_exit
from tests.support.processes.patience import PATIENCE_S

# Ignores SIGTERM if told so, says that it runs by connecting to us, and ends when its stdin does.
_SERVICE = """
import os, signal, socket, sys
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--broken" in sys.argv:
    sys.exit("it is broken")
for argument in sys.argv:
    if argument.startswith("--cluster-token-file="):
        token = open(argument.partition("=")[2]).read()
        seen = " ".join([*sys.argv, *map(str, os.environ.items())])
        print("token:", token, "seen elsewhere:", token in seen, file=sys.stderr, flush=True)
socket.create_connection(("127.0.0.1", int(os.environ["TEST_PORT"]))).close()
sys.stdin.read()
"""


@dataclass
class Stage:
    """Where fake services run: their environment, and what tells that one is running."""

    environ: dict[str, str]
    is_running: asyncio.Event

    def child(self, name: str, *flags: str, cluster_token: str | None = None) -> Child:
        return Child(name, "fake_service", flags, self.environ, cluster_token)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    (tmp_path / "fake_service.py").write_text(_SERVICE)
    is_running = asyncio.Event()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_running.set()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "TEST_PORT": str(port)}
    async with server:
        yield Stage(environ, is_running)


async def test_child_ends_with_0_when_its_stdin_ends(stage: Stage) -> None:
    child = stage.child("child")
    await child.start()
    await asyncio.wait_for(stage.is_running.wait(), PATIENCE_S)
    assert child._process is not None
    assert child._process.stdin is not None

    child._process.stdin.close()

    assert await asyncio.wait_for(child.wait(), PATIENCE_S) == 0


async def test_child_is_killed_when_it_does_not_stop_in_time(stage: Stage) -> None:
    child = stage.child("child", "--stubborn")
    await child.start()
    await asyncio.wait_for(stage.is_running.wait(), PATIENCE_S)

    await child.stop(grace_s=0.05)

    assert describe_exit(await child.wait()) == "killed by SIGKILL"


async def test_child_gets_the_cluster_token_privately(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    child = stage.child("child", cluster_token="a secret of the cluster")
    for _ in range(2):
        stage.is_running.clear()
        await child.start()
        await asyncio.wait_for(stage.is_running.wait(), PATIENCE_S)
        await child.stop(grace_s=PATIENCE_S)

        assert capfd.readouterr().err == "token: a secret of the cluster seen elsewhere: False\n"


async def test_supervisor_stops_the_others_and_fails_when_one_ends_early(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    # Nothing ever listens there.
    config = ServeConfig("127.0.0.1:1", None, "model", False, 0.0, time.monotonic())
    scheduler, executor = stage.child("the scheduler"), stage.child("executor 1")
    broken = stage.child("executor 2", "--broken")

    assert await Supervisor(config, scheduler, [executor, broken]).run() == 1

    assert await scheduler.wait() != 0
    assert await executor.wait() != 0
    errors = capfd.readouterr().err
    assert "it is broken" in errors
    assert "executor 2 ended before the model was served (exit code 1); see above" in errors


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (-99, "killed by signal 99"),
    ],
)
def test_describe_exit_says_what_happened_when_a_process_ended(code: int, text: str) -> None:
    assert describe_exit(code) == text
