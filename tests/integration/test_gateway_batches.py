"""Batches of many prompts, and requests that a stop string ended, at the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from splitserve_client import SamplingParams
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.gateway import (
    RunningGateway,
    WatchedGateway,
    running_gateway,
    text_executor,
    watched_gateway,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/completions"
AT_A_TIME = 64


def batch(gateway: RunningGateway, num_prompts: int) -> list[list[int]]:
    return [gateway.tokenizer.encode(f"prompt {number}") for number in range(num_prompts)]


def expected_tokens(prompt: list[int]) -> list[int]:
    params = SamplingParams(seed=3, max_tokens=2)
    (completion,) = expected_completions(prompt, params, vocab_size=406)
    return list(completion.token_ids)


async def wait_until_open(gateway: RunningGateway, num_requests: int) -> None:
    fleet = gateway.server.app.state.gateway.fleet
    await gateway.until(lambda: fleet.num_session_requests == num_requests)


async def test_batch_is_answered_in_order_when_beyond_the_queue(tmp_path: Path) -> None:
    watch = StepWatch()
    executor = text_executor(tmp_path, fault=watch)
    async with running_gateway(executor, max_num_waiting=AT_A_TIME, max_num_seqs=4) as gateway:
        prompts = batch(gateway, 150)
        watch.hold()
        answering = asyncio.create_task(
            gateway.post(PATH, prompt=prompts, seed=3, max_tokens=2, return_token_ids=True)
        )
        await watch.wait_held()
        await wait_until_open(gateway, AT_A_TIME)
        watch.release()
        choices = (await answering)["choices"]

    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    assert [choice["token_ids"] for choice in choices] == list(map(expected_tokens, prompts))


@pytest.mark.parametrize("ends_by_error", [True, False])
async def test_batch_leaves_nothing_behind_when_it_ends_in_the_middle(
    tmp_path: Path, ends_by_error: bool
) -> None:
    async with running_gateway(text_executor(tmp_path), max_num_seqs=8) as gateway:
        prompts = batch(gateway, 150)
        prompts[100 if ends_by_error else -1] = [406]
        body = {"prompt": prompts, "max_tokens": 2, "stream": True}
        async with gateway.http.stream("POST", PATH, json=body) as answer:
            if ends_by_error:
                *_, error, done, _ = (await answer.aread()).decode().split("\n\n")
                assert '"param":"prompt"' in error
                assert done == "data: [DONE]"
            else:
                await anext(answer.aiter_lines())
        await wait_until_open(gateway, 0)
        await gateway.service.wait_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WatchedGateway]:
    async with watched_gateway(tmp_path_factory.mktemp("tokenizer")) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "the fox"}),
        ("/v1/completions", {"prompt": "the fox", "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the fox?"}]}),
        ("/v1/responses", {"input": "the fox?"}),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_scheduler_stops_when_a_stop_string_ended_a_text(
    watched: WatchedGateway,
    path: str,
    asked: dict[str, object],
    is_streamed: bool,
) -> None:
    gateway, watch = watched
    # Every letter is a stop: each text ends within its first tokens.
    stop = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**asked, limit: 900, "stop": stop, "stream": is_streamed, "seed": 1}
    num_before = len(watch.steps)
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text
    await gateway.service.wait_idle()

    assert len(watch.steps) - num_before < 900 / 3
