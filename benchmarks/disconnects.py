"""Clients of a gateway that leave at random places, and what is left of them: nothing.

`make bench BENCH=disconnects ARGS="--clients 10000"`. Fake executors, a real scheduler and gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from benchmarks.report import emit
from tests.support.processes.gateway import running_gateway, text_executor
from tests.support.processes.http_clients import Leftovers, leave_often, wait_for_nothing


async def leave(num_clients: int, width: int, seed: int) -> None:
    """Raises TimeoutError if anything is left."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_gateway(text_executor(Path(folder))) as gateway:
            await leave_often(gateway, 50, width, random.Random(seed))
            await gateway.http.aclose()
            await gateway.service.wait_idle()
            before = Leftovers.now()
            start = time.perf_counter()
            await leave_often(gateway, num_clients, width, random.Random(seed + 1))
            elapsed_s = time.perf_counter() - start
            await wait_for_nothing(gateway.server, gateway.service, before)
    emit("disconnects", clients=num_clients, width=width, elapsed_s=round(elapsed_s, 1), left=0)


def main() -> None:
    """Runs until all have left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    asyncio.run(leave(arguments.clients, arguments.width, arguments.seed))


if __name__ == "__main__":
    main()
