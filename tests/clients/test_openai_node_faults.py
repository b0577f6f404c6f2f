"""What the official Node package makes of a server that is full or slow, and of leaving it."""

from __future__ import annotations

import asyncio
import json
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.test_openai_python_faults import MESSAGES
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.gateway import RunningGateway

SCRIPT = Path(__file__).parent / "node" / "openai_faults.mjs"
TIMEOUT_S = 60
# Steps that may be on their way when a request is aborted.
NUM_STEPS_AHEAD = 4
pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


@dataclass(frozen=True, slots=True)
class NodeCall:
    """A call of `openai_faults.mjs` that is being made."""

    process: Process

    async def hear(self) -> Any:  # noqa: ANN401
        """The next thing that it says."""
        assert self.process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            return json.loads(await self.process.stdout.readline())

    def tell(self) -> None:
        """Lets it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")


@asynccontextmanager
async def node_call(gateway: RunningGateway, model: str, name: str) -> AsyncIterator[NodeCall]:
    """`name` of `openai_faults.mjs`, which lives on until the end of the block."""
    process = await asyncio.create_subprocess_exec(
        "node", SCRIPT, gateway.url, model, name, stdin=PIPE, stdout=PIPE
    )
    try:
        yield NodeCall(process)
    finally:
        await process.communicate(b"\n")
    assert process.returncode == 0


@asynccontextmanager
async def full(
    gateway: RunningGateway, watch: StepWatch, model: str
) -> AsyncIterator[asyncio.Task[object]]:
    """One request runs and one waits: the next one is refused. Brings a task that both answer."""
    body = {"model": model, "messages": MESSAGES, "max_tokens": 3}

    async def chat() -> object:
        return await gateway.post("/v1/chat/completions", **body)

    running = asyncio.create_task(chat())
    await watch.wait_held()
    waiting = asyncio.create_task(chat())
    await gateway.service.wait_until_queued(1)
    both = asyncio.ensure_future(asyncio.gather(running, waiting))
    try:
        yield both
    finally:
        watch.release()
        await both
