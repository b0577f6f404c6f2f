"""Keeps requests running at a scheduler, and says how many tokens came.

`python -m benchmarks.session_load SCHEDULER NUM_REQUESTS`. For each line on standard input it
prints how many tokens have come since it began.
"""

from __future__ import annotations

import asyncio
import sys

from benchmarks.ceiling import Load


async def serve(address: str, num_requests: int) -> None:
    """Until standard input ends."""
    load = Load(address, num_requests)
    running = asyncio.create_task(load.run())
    while await asyncio.to_thread(sys.stdin.readline):
        if running.done():
            running.result()
        sys.stdout.write(f"{load.num_tokens}\n")
        sys.stdout.flush()
    running.cancel()
    await asyncio.wait({running})


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
