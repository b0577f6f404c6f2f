"""Real processes under more load than fits: requests are preempted, swapped out, and come back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from splitserve_options.option import BUNDLED_MODEL
from tests.support.processes.addresses import reserve_address
from tests.support.processes.gateway_process import wait_ready
from tests.support.processes.interrupts import children_take_sigint
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.processes import Processes, processes

# Some twenty requests of this size need twice as many blocks as two executors have.
_POOLS = ("--num-device-blocks", "80", "--num-host-blocks", "160")
_LOAD = (
    *("--concurrency", "24", "--requests", "1000000", "--output-tokens", "uniform:60:200"),
    *("--prompt-tokens", "lognormal:60:0.5", "--shared-prefix", "48:3"),
    *("--max-prompt-tokens", "300", "--max-output-tokens", "200", "--seed", "1", "--quiet"),
)


@dataclass(frozen=True, slots=True)
class LoadedStack:
    """A scheduler, two executors of the bundled model, a gateway, and `splitserve bench`.

    `url`: of the live page.
    """

    processes: Processes
    url: str
    load: asyncio.subprocess.Process

    async def end_load(self) -> str:
        """Interrupts it, as Ctrl-C does; its report."""
        self.load.send_signal(signal.SIGINT)
        said, _ = await asyncio.wait_for(self.load.communicate(), PATIENCE_S)
        return said.decode()


@asynccontextmanager
async def loaded_stack() -> AsyncIterator[LoadedStack]:
    """It runs until the end of the context."""
    page, http = reserve_address(), reserve_address()
    with processes(Path(BUNDLED_MODEL)) as served:
        served.start_scheduler("--preemption-mode", "swap")
        for _ in range(2):
            served.start_executor(*_POOLS)
        served.start_gateway("--http", http, "--live-listen", page)
        await served.wait_until(lambda executors: len(executors) == 2)
        async with httpx2.AsyncClient(base_url=f"http://{http}", trust_env=False) as client:
            await wait_ready(client)
        with children_take_sigint():
            load = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "splitserve_bench", f"http://{http}/v1", *_LOAD),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        try:
            yield LoadedStack(served, f"http://{page}/", load)
        finally:
            if load.returncode is None:
                load.kill()
                await load.wait()
