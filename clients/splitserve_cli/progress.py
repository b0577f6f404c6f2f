"""What a terminal shows while something takes longer than a second."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_FIRST_S = 1
_LINE_EVERY_S = 10


@asynccontextmanager
async def showing_progress(what: str) -> AsyncIterator[None]:
    """Shows `what` and the seconds on standard error, from the first second on.

    On a terminal one line is rewritten; in a log there is a line every ten seconds.
    """
    task = asyncio.create_task(_show(what))
    try:
        yield
    finally:
        task.cancel()
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


async def _show(what: str) -> None:
    is_terminal = sys.stderr.isatty()
    start = time.monotonic()
    while True:
        await asyncio.sleep(1)
        seconds = round(time.monotonic() - start)
        if is_terminal:
            # The cursor stays in front: what a child logs then takes the place of this line.
            sys.stderr.write(f"\r\x1b[K{what} ... {seconds} s\r")
        elif seconds == _FIRST_S or seconds % _LINE_EVERY_S == 0:
            sys.stderr.write(f"{what} ... {seconds} s\n")
        sys.stderr.flush()
