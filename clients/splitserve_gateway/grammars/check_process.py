"""A process that tries grammars, beside an event loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from splitserve_grammars.limits import NUM_TRIES
from splitserve_grammars.trial import (
    MAX_LINE_BYTES,
    TrialUnavailable,
    Verdict,
    decode_answer,
    encode_task,
    trial_command,
)


class CheckProcess:
    """Tries one grammar at a time; starts with the first."""

    def __init__(self, max_address_bytes: int, max_wall_s: float) -> None:
        """`max_wall_s`: after so long it is given up, also where the machine is busy."""
        self._max_address_bytes = max_address_bytes
        self._max_wall_s = max_wall_s
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, kind: str, texts: Sequence[str], max_cpu_s: float) -> Verdict:
        """Raises TrialTooSlow, and TrialUnavailable if two processes in a row came to nothing."""
        line = encode_task(kind, texts, max_cpu_s)
        for _ in range(NUM_TRIES - 1):
            with suppress(TrialUnavailable):
                return await self._ask(line)
        return await self._ask(line)

    async def kill(self) -> None:
        """Ends the process, if there is one, and what it began: that has its pipes, too.

        asyncio waits until nobody has them.
        """
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _ask(self, line: bytes) -> Verdict:
        try:
            async with asyncio.timeout(self._max_wall_s):
                return decode_answer(await self._answer(line))
        except (TimeoutError, OSError, TrialUnavailable) as error:
            await self.kill()
            raise TrialUnavailable("the grammar could not be checked in time") from error

    async def _answer(self, line: bytes) -> bytes:
        process = await self._running()
        assert process.stdin is not None, "it has pipes"
        assert process.stdout is not None, "it has pipes"
        # One that has ended says nothing, which is seen below. uvloop has a RuntimeError for it.
        with suppress(ConnectionError, RuntimeError):
            process.stdin.write(line)
            await process.stdin.drain()
        return await process.stdout.readline()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *trial_command(self._max_address_bytes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        return self._process
