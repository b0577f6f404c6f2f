"""The process that compiles grammars, on uvloop and on asyncio's loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import uvloop

from splitserve_gateway.grammars import CheckProcess, check_process
from splitserve_grammars import MAX_ADDRESS_BYTES, GrammarTrialResult

LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)
# Begins a process that keeps its pipes, says which one that is, and answers nobody.
KEEPS_PIPES = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
open(sys.argv[1], "w").write(f"{child.pid}\\n")
time.sleep(3600)
"""

each_loop = pytest.mark.parametrize("new_loop", LOOPS)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - there is no event of what the kernel does
        await asyncio.sleep(0.01)


@each_loop
def test_process_is_replaced_when_killed_while_idle(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def ask_twice() -> list[GrammarTrialResult]:
        process, before = CheckProcess(MAX_ADDRESS_BYTES, 240), children()
        verdicts = [await process.ask("regex", ["a"], 60)]
        killed = children() - before
        for child in killed:
            os.kill(child, signal.SIGKILL)
        await until(lambda: not any(map(is_alive, killed)))
        verdicts.append(await process.ask("regex", ["(a"], 60))
        await process.close()
        return verdicts

    with asyncio.Runner(loop_factory=new_loop) as runner:
        good, bad = runner.run(ask_twice())
    assert not good.error
    assert bad.error


@each_loop
def test_nobody_forks_to_start_a_process(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """In a fork runs what libraries do there: of gRPC and uvloop it crashed one of twenty."""
    forks = list[int]()
    os.register_at_fork(before=lambda: forks.append(os.getpid()))

    async def ask() -> GrammarTrialResult:
        process = CheckProcess(MAX_ADDRESS_BYTES, 240)
        verdict = await process.ask("regex", ["a"], 60)
        await process.close()
        return verdict

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert not runner.run(ask()).error
    assert forks == []


@each_loop
def test_children_of_a_process_end_with_it(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", KEEPS_PIPES, str(pid_file)]
    monkeypatch.setattr(check_process, "trial_command", lambda *_, **__: command)

    async def ask_and_kill() -> None:
        process = CheckProcess(MAX_ADDRESS_BYTES, 3600)
        asking = asyncio.create_task(process.ask("regex", ["a"], 60))
        await until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        asking.cancel()
        await asyncio.wait({asking})
        await process.close()
        await until(lambda: not is_alive(int(pid_file.read_text())))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(ask_and_kill())
