from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from splitserve_client.child import Child, describe_exit
from splitserve_client.supervisor import ServeConfig, Supervisor

# Says on standard error what it is, ignores SIGTERM if told so, and ends when its stdin does.
_SERVICE = """
import signal, sys
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--broken" in sys.argv:
    sys.exit("it is broken")
sys.stderr.write("running\\n")
sys.stderr.flush()
sys.stdin.read()
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "fake_service.py").write_text(_SERVICE)
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def make_config() -> ServeConfig:
    # Nothing ever listens there.
    return ServeConfig("127.0.0.1:1", "model", False, 0.0, time.monotonic())


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where processes write: pytest's own standard error is none that they could inherit."""
    path = tmp_path / "stderr"
    path.touch()
    monkeypatch.setattr(sys, "stderr", path.open("a"))
    return path


async def until_running(stderr: Path) -> None:
    async with asyncio.timeout(20):
        while "running" not in stderr.read_text():
            await asyncio.sleep(0)  # noqa: ASYNC110 - a file has no event


async def test_child_ends_with_0_when_it_is_asked_to_by_end_of_stdin(
    environ: dict[str, str], stderr: Path
) -> None:
    child = Child("child", "fake_service", [], environ)
    await child.start()
    await until_running(stderr)
    assert child._process is not None
    assert child._process.stdin is not None

    child._process.stdin.close()

    assert await asyncio.wait_for(child.wait(), 20) == 0


async def test_child_is_killed_when_it_does_not_stop_in_time(
    environ: dict[str, str], stderr: Path
) -> None:
    child = Child("child", "fake_service", ["--stubborn"], environ)
    await child.start()
    await until_running(stderr)

    await child.stop(grace_s=0.05)

    assert describe_exit(await child.wait()) == "killed by SIGKILL"


async def test_supervisor_stops_the_others_and_fails_when_one_ends_early(
    environ: dict[str, str], stderr: Path
) -> None:
    scheduler = Child("the scheduler", "fake_service", [], environ)
    executors = [
        Child("executor 1", "fake_service", [], environ),
        Child("executor 2", "fake_service", ["--broken"], environ),
    ]

    code = await Supervisor(make_config(), scheduler, executors).run()

    assert code == 1
    assert await scheduler.wait() != 0
    assert await executors[0].wait() != 0
    sys.stderr.flush()
    text = stderr.read_text()
    assert "it is broken" in text
    assert "executor 2 ended before the model was served (exit code 1); see above" in text


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
