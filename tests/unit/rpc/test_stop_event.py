"""How a process learns that it is to end; in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TIMEOUT_S = 240.0
_PROGRAM = """
import asyncio, threading, time
from splitserve_rpc import server

async def main():
    server._ORPHAN_GRACE_S = 0.0
    stop = server.stop_event(exit_on_stdin_eof=True, drain_s={drain_s})
    print("started", flush=True)
    {work}

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("work", "drain_s", "code"),
    [
        ("await stop.wait()", 600, 0),
        ("time.sleep(600)", 0.01, 1),
        ("await asyncio.gather(stop.wait(), asyncio.to_thread(time.sleep, 600))", 0.01, 1),
        ("threading.Thread(target=time.sleep, args=(600,)).start()", 0.01, 1),
    ],
    ids=["well", "blocked loop", "thread of the loop", "thread"],
)
def test_process_ends_when_its_parent_is_gone_whatever_it_is_at(
    work: str, drain_s: float, code: int
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(work=work, drain_s=drain_s)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == code
