"""The official Python package at a full or slow gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.support.processes.gateway import RunningGateway, WatchedGateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES: Any = [{"role": "user", "content": "fox"}]


@pytest.fixture(autouse=True)
def _released(small_gateway: WatchedGateway) -> Iterator[None]:
    yield
    small_gateway[1].release()


def client_of(gateway: RunningGateway, **options: Any) -> AsyncOpenAI:  # noqa: ANN401
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", **options)


async def chat(client: AsyncOpenAI) -> str | None:
    answer = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=3)
    return answer.choices[0].finish_reason


async def test_client_waits_as_told_and_succeeds_when_queue_was_full(
    small_gateway: WatchedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, watch = small_gateway
    waited: list[float] = []
    watch.hold()
    async with client_of(gateway, max_retries=1) as client:
        # One request runs and one waits: the next one is refused.
        others = [asyncio.create_task(chat(client))]
        await watch.wait_held()
        others.append(asyncio.create_task(chat(client)))
        await gateway.service.wait_until_queued(1)

        async def wait(seconds: float) -> None:
            """Lets the others finish, instead of sleeping."""
            waited.append(seconds)
            watch.release()
            await asyncio.gather(*others)

        monkeypatch.setattr("openai._base_client.anyio.sleep", wait)
        assert await chat(client) == "length"

    (seconds,) = waited
    assert seconds >= 1


async def test_timeout_of_the_client_leaves_nothing_behind(small_gateway: WatchedGateway) -> None:
    gateway, watch = small_gateway
    watch.hold()
    async with client_of(gateway, max_retries=0, timeout=0.5) as client:
        with pytest.raises(openai.APITimeoutError):
            await chat(client)
    # The request is aborted though the step that it is in is held.
    await gateway.service.wait_for(lambda listed: listed.executors[0].num_running_requests == 0)
    watch.release()
    await gateway.service.wait_idle()
