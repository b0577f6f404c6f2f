"""Tests `splitserve top` in a terminal, in a dumb one, and without one."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from contextlib import AsyncExitStack, closing

from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.forked import children_take_sigint
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import scheduler_in_process

# What a terminal is told: another screen, and back.
LOOK, BACK = b"\x1b[?1049h", b"\x1b[?1049l"
BLOCKS = re.compile(r"[·c]{30}")
CONTROLS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs `splitserve top` and reads what it draws."""

    def __init__(
        self, address: str, term: str = "xterm", rows: int = 24, columns: int = 80
    ) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(rows, columns)
        command = (sys.executable, "-m", "splitserve_cli", "top", "--address", address)
        # COLUMNS and LINES would say more than the terminal does.
        inherited = {name: os.environ[name] for name in os.environ.keys() - {"COLUMNS", "LINES"}}
        environment = inherited | {"TERM": term, "PYTHONPATH": os.pathsep.join(sys.path)}
        with children_take_sigint():
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
            )
        os.close(theirs)
        self.drawn = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, text: bytes | None) -> bytes:
        """What is drawn from now until `text` is; None: until the program ends."""
        begin = len(self.drawn)
        while text is None or text not in self.drawn[begin:]:
            assert select.select([self._ours], [], [], PATIENCE_S)[0], self.drawn[-1000:]
            try:
                self.drawn += os.read(self._ours, 65536)
            except OSError:  # nobody has it open any more
                assert text is None, self.drawn[-1000:]
                break
        return self.drawn[begin:]

    def close(self) -> None:
        """Ends what runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def shows_narrow_blocks(drawn: bytes) -> bool:
    lines = CONTROLS.sub(b"", drawn).decode(errors="replace").splitlines()
    return any(BLOCKS.fullmatch(line.strip()) for line in lines)


async def test_top_draws_until_interrupted_as_wide_as_its_terminal_is() -> None:
    async with scheduler_in_process(FakeExecutor()) as scheduler:
        with closing(Terminal(scheduler.address)) as top:
            seen = await asyncio.to_thread(top.read_until, b"serving")
            assert LOOK in seen
            assert not shows_narrow_blocks(seen)
            top.resize(24, 30)
            while not shows_narrow_blocks(seen):
                seen = await asyncio.to_thread(top.read_until, b"splitserve top")
            top.process.send_signal(signal.SIGINT)
            assert BACK in await asyncio.to_thread(top.read_until, None)
            assert await asyncio.to_thread(top.process.wait, PATIENCE_S) == 130


async def test_top_says_that_its_scheduler_is_gone() -> None:
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(scheduler_in_process(FakeExecutor()))
        with closing(Terminal(scheduler.address)) as top:
            await asyncio.to_thread(top.read_until, b"serving")
            await stack.aclose()
            end = await asyncio.to_thread(top.read_until, None)
            assert b"splitserve top: " in end.partition(BACK)[2]
            assert b"Traceback" not in end
            assert await asyncio.to_thread(top.process.wait, PATIENCE_S) == 1


async def test_top_prints_one_picture_where_nothing_can_be_drawn_twice() -> None:
    async with scheduler_in_process(FakeExecutor()) as scheduler:
        with closing(Terminal(scheduler.address, "dumb")) as top:
            seen = await asyncio.to_thread(top.read_until, None)
            assert await asyncio.to_thread(top.process.wait, PATIENCE_S) == 0
    assert seen.count(b"splitserve top") == 1
    assert b"serving" in seen
    assert b"\x1b" not in seen
