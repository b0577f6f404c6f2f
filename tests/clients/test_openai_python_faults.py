"""What the official Python package makes of a server that is full, slow, or gone for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.support.processes.fake_service import StepWatch
from tests.support.processes.gateway import RunningGateway, WatchedGateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES: Any = [{"role": "user", "content": "fox"}]


@asynccontextmanager
async def held(
    small: WatchedGateway,
) -> AsyncIterator[tuple[RunningGateway, StepWatch, str]]:
    """A gateway before one sequence at a time and a queue of one; steps are held from the first."""
    gateway, watch = small
    models = (await gateway.http.get("/v1/models")).json()
    watch.hold()
    try:
        yield gateway, watch, models["data"][0]["id"]
    finally:
        watch.release()
        await gateway.service.wait_idle()


def client_of(gateway: RunningGateway, **options: Any) -> AsyncOpenAI:  # noqa: ANN401
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", **options)


async def wait_left(gateway: RunningGateway, watch: StepWatch) -> None:
    """Waits until the request is aborted, by itself: the step that it is in is held; then idle."""
    await gateway.service.wait_for(lambda listed: listed.executors[0].num_running_requests == 0)
    watch.release()
    await gateway.service.wait_idle()


async def chat(client: AsyncOpenAI, model: str) -> str | None:
    answer = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=3)
    return answer.choices[0].finish_reason


@asynccontextmanager
async def full(
    gateway: RunningGateway, watch: StepWatch, model: str
) -> AsyncIterator[list[asyncio.Task[str | None]]]:
    """One request runs and one waits: the next one is refused."""
    async with client_of(gateway, max_retries=0) as client:
        running = asyncio.create_task(chat(client, model))
        await watch.wait_held()
        waiting = asyncio.create_task(chat(client, model))
        await gateway.service.wait_until_queued(1)
        tasks = [running, waiting]
        try:
            yield tasks
        finally:
            watch.release()
            await asyncio.gather(*tasks)


async def test_full_queue_is_a_rate_limit_with_a_time_to_wait(
    small_gateway: WatchedGateway,
) -> None:
    async with (
        held(small_gateway) as (gateway, watch, model),
        full(gateway, watch, model),
        client_of(gateway, max_retries=0) as client,
    ):
        with pytest.raises(openai.RateLimitError) as raised:
            await chat(client, model)

    assert int(raised.value.response.headers["retry-after"]) >= 1
    assert (raised.value.type, raised.value.code) == ("rate_limit_error", "queue_full")


async def test_client_waits_as_told_and_succeeds_when_the_queue_has_room_again(
    small_gateway: WatchedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async with (
        held(small_gateway) as (gateway, watch, model),
        full(gateway, watch, model) as others,
        client_of(gateway, max_retries=1) as client,
    ):

        async def wait(seconds: float) -> None:
            """Instead of sleeping: the others finish."""
            waited.append(seconds)
            watch.release()
            await asyncio.gather(*others)

        monkeypatch.setattr("openai._base_client.anyio.sleep", wait)
        assert await chat(client, model) == "length"

    assert len(waited) == 1
    assert waited[0] >= 1


async def test_timeout_of_the_client_leaves_nothing_behind(
    small_gateway: WatchedGateway,
) -> None:
    async with held(small_gateway) as (gateway, watch, model):
        async with client_of(gateway, max_retries=0, timeout=0.5) as client:
            with pytest.raises(openai.APITimeoutError):
                await chat(client, model)
        await wait_left(gateway, watch)


async def test_stream_that_is_left_leaves_nothing_behind(
    small_gateway: WatchedGateway,
) -> None:
    async with held(small_gateway) as (gateway, watch, model):
        watch.hold(after=3)
        async with client_of(gateway, max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=model, messages=MESSAGES, max_tokens=900, stream=True
            )
            async for _ in stream:
                break
            await stream.close()
        await wait_left(gateway, watch)
