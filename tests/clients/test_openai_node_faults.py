"""The official Node package: a full server, and calls that are left early."""

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
from tests.support.processes.gateway import RunningGateway, WatchedGateway
from tests.support.processes.patience import PATIENCE_S

SCRIPT = Path(__file__).parent / "node" / "openai_faults.mjs"
pytestmark = [
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass(frozen=True, slots=True)
class NodeCall:
    """A call of `openai_faults.mjs` that is being made."""

    process: Process

    async def hear(self) -> Any:  # noqa: ANN401
        """The next thing that it says."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            return json.loads(await self.process.stdout.readline())

    def tell(self) -> None:
        """Lets it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")


@asynccontextmanager
async def held(
    small: WatchedGateway,
) -> AsyncIterator[tuple[RunningGateway, StepWatch, str]]:
    """A gateway with one row and a queue of one, whose steps are held, and its model."""
    gateway, watch = small
    models = (await gateway.http.get("/v1/models")).json()
    watch.hold()
    try:
        yield gateway, watch, models["data"][0]["id"]
    finally:
        watch.release()
        await gateway.service.wait_idle()


async def wait_left(gateway: RunningGateway, watch: StepWatch) -> None:
    """Waits until the request whose step is held is aborted; then lets the step end."""
    await gateway.service.wait_for(lambda listed: listed.executors[0].num_running_requests == 0)
    watch.release()
    await gateway.service.wait_idle()


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
) -> AsyncIterator[asyncio.Future[Any]]:
    """One request runs and one waits: the next one is refused. Brings the answers of both."""
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


async def test_node_waits_as_told_and_succeeds_when_the_queue_has_room_again(
    small_gateway: WatchedGateway,
) -> None:
    async with (
        held(small_gateway) as (gateway, watch, model),
        full(gateway, watch, model) as others,
        node_call(gateway, model, "retried") as call,
    ):
        retry_after_s = int((await call.hear())["retry_after"])
        watch.release()
        await others
        finish_reason, num_tries, waited_ms = (await call.hear())["came"]

    assert (finish_reason, num_tries) == ("length", 2)
    # By itself it would wait for half a second at most.
    assert waited_ms >= retry_after_s * 1000 >= 1000


async def test_answer_that_is_aborted_leaves_nothing_behind(
    small_gateway: WatchedGateway,
) -> None:
    async with (
        held(small_gateway) as (gateway, watch, model),
        node_call(gateway, model, "abort") as call,
    ):
        watch.hold(after=5)
        await watch.wait_held()
        call.tell()
        came = await call.hear()
        await wait_left(gateway, watch)

    assert came == {"came": ["APIUserAbortError", None, None, None]}


@pytest.mark.parametrize(
    ("name", "came"),
    [
        ("leave_stream", "left"),
        ("abort_helper", ["APIUserAbortError", None, None, None]),
    ],
)
async def test_stream_that_is_left_leaves_nothing_behind(
    small_gateway: WatchedGateway, name: str, came: object
) -> None:
    async with held(small_gateway) as (gateway, watch, model):
        watch.hold(after=5)
        async with node_call(gateway, model, name) as call:
            assert await call.hear() == "began"
            await watch.wait_held()
            call.tell()
            assert await call.hear() == {"came": came}
            await wait_left(gateway, watch)
