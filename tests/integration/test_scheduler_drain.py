"""Tests a scheduler that stops: it names others, and its clients go on there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from splitserve_client import (
    AsyncClient,
    Finish,
    SamplingParams,
)
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service

PROMPT = [4, 7, 9]
PARAMS = SamplingParams(seed=3, max_tokens=40)
KINDS = (PARAMS, replace(PARAMS, n=3), replace(PARAMS, n=2, best_of=3))


@dataclass(slots=True)
class Two:
    """A scheduler that names another, and the steps of its executor."""

    going: FakeService
    staying: FakeService
    watch: StepWatch


@asynccontextmanager
async def two(drain_timeout_s: float, **options: object) -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        staying = await stack.enter_async_context(fake_service(FakeExecutor()))
        watch = StepWatch()
        options = {"peers": staying.scheduler.address, "drain_timeout_s": drain_timeout_s} | options
        going = await stack.enter_async_context(fake_service(FakeExecutor(fault=watch), **options))
        stack.callback(watch.release)
        yield Two(going, staying, watch)


async def complete(client: AsyncClient, params: SamplingParams) -> None:
    generation = await client.complete(PROMPT, params)
    assert generation.completions == expected_completions(PROMPT, params)


async def test_streams_go_on_elsewhere_when_their_scheduler_stops() -> None:
    async with two(0) as stack:
        stack.watch.hold(after=10)
        client = stack.going.client
        completing = [asyncio.create_task(complete(client, params)) for params in KINDS]
        await stack.watch.wait_held()
        stack.going.scheduler.terminate()
        await asyncio.gather(*completing)
        assert stack.going.scheduler.address != stack.staying.scheduler.address
        # And so does what begins now, over the same client.
        await complete(client, PARAMS)


async def tokens_of(request) -> list[int]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    tokens: list[int] = []
    async for event in request:
        if not isinstance(event, Finish):
            tokens += event.token_ids
    return tokens


async def test_drain_moves_what_waits_and_ends_what_runs() -> None:
    async with two(3600, max_num_seqs=1) as stack:
        client = stack.going.client
        stack.watch.hold(after=3)
        running = asyncio.create_task(complete(client, PARAMS))
        await stack.watch.wait_held()
        waiting = asyncio.create_task(complete(client, KINDS[0]))
        await stack.going.wait_until_queued(1)
        stack.going.scheduler.terminate()
        # Both while the first is held.
        await waiting
        async with AsyncClient(stack.going.scheduler.address) as another:
            await complete(another, PARAMS)
        num_steps = len(stack.watch.steps)
        assert not running.done()
        stack.watch.release()
        await running
        assert len(stack.watch.steps) > num_steps


async def test_session_submits_elsewhere_when_its_scheduler_drains() -> None:
    async with two(3600) as stack, stack.going.client.session() as session:
        stack.watch.hold(after=3)
        running = asyncio.create_task(tokens_of(session.submit(PROMPT, PARAMS)))
        await stack.watch.wait_held()
        stack.going.scheduler.terminate()
        await until_draining(stack.going.client)
        expected = list(expected_completions(PROMPT, PARAMS)[0].token_ids)
        assert await tokens_of(session.submit(PROMPT, PARAMS)) == expected
        # Where it waits nothing has moved, and that can be aborted still.
        aborted = session.submit(PROMPT, PARAMS)
        aborted.abort()
        await tokens_of(aborted)
        assert not running.done()
        stack.watch.release()
        assert await running == expected
        assert await tokens_of(session.submit(PROMPT, PARAMS)) == expected


async def until_draining(client: AsyncClient) -> None:
    while await client.is_serving():
        pass
