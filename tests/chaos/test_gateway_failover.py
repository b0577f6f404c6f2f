"""A scheduler dies or drains under a gateway that has another one: real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.contract.stranger.process import poll
from tests.support.processes.addresses import reserve_address
from tests.support.processes.gateway_process import GatewayProcess, gateway_process
from tests.support.processes.http_answers import HttpAnswer
from tests.support.processes.mortal_scheduler import mortal_scheduler
from tests.support.processes.patience import PATIENCE_S

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

PROMPT = "one two three"
USAGE: Any = {"stream": True, "stream_options": {"include_usage": True}}
# Path and body of each; of the last nothing comes before its end.
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": PROMPT, "seed": 1, **USAGE}),
    ("/v1/completions", {"prompt": PROMPT, "seed": 2, "n": 2, "logprobs": 2, **USAGE}),
    ("/v1/completions", {"prompt": [PROMPT, "four"], "seed": 3, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": PROMPT, "seed": 4, "n": 2, "max_tokens": 60}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "seed": 5, **USAGE}),
    ("/v1/responses", {"input": "five", "seed": 6, "stream": True}),
    ("/v1/responses", {"input": "six", "seed": 7}),
    ("/v1/completions", {"prompt": PROMPT, "seed": 8, "best_of": 2, "max_tokens": 60}),
)
# One of them has two prompts.
NUM_REQUESTS = len(REQUESTS) + 1

# A scheduler that is slow to answer is taken for lost until it does: there is none, or none for
# the model.
AWAY = (503, 404)


async def ask(
    gateway: GatewayProcess, path: str, body: dict[str, Any], model: str = "fake"
) -> HttpAnswer:
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": model, length: 60, "ignore_eos": True, **body}

    async def post() -> tuple[bool, httpx2.Response]:
        answer = await gateway.http.post(path, json=body)
        return answer.status_code not in AWAY, answer

    answer = await poll(post, PATIENCE_S)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return HttpAnswer.whole(answer.json())
    return HttpAnswer.of(answer.text)


async def test_answers_are_the_same_when_they_go_on_at_another_scheduler(tmp_path: Path) -> None:
    address = reserve_address()
    async with (
        mortal_scheduler(tmp_path) as first,
        gateway_process(first.address, address) as gateway,
    ):
        await gateway.wait_ready()
        first.watch.hold()
        asking = [asyncio.create_task(ask(gateway, *request)) for request in REQUESTS]
        await first.wait_requests(NUM_REQUESTS)
        first.watch.hold(after=25)
        await first.watch.wait_held()
        async with mortal_scheduler(tmp_path, address):
            assert not any(task.done() for task in asking)
            await first.kill()
            first.watch.release()
            moved = await asyncio.gather(*asking)
            assert moved == [await ask(gateway, *request) for request in REQUESTS]


async def test_answers_go_on_at_another_scheduler_when_theirs_is_drained(tmp_path: Path) -> None:
    async with (
        mortal_scheduler(tmp_path, model_name="here") as first,
        mortal_scheduler(tmp_path, model_name="there") as second,
        gateway_process(first.address, second.address) as gateway,
    ):
        await gateway.wait_models({"here", "there"})
        first.watch.hold()
        asking = [asyncio.create_task(ask(gateway, *request, "here")) for request in REQUESTS]
        await first.wait_requests(NUM_REQUESTS)
        first.watch.hold(after=25)
        await first.watch.wait_held()
        first.scheduler.terminate()
        await first.wait_gone()
        first.watch.release()
        moved = await asyncio.gather(*asking)
        assert moved == [await ask(gateway, *request, "there") for request in REQUESTS]


async def test_requests_are_refused_with_503_while_the_only_scheduler_drains(
    tmp_path: Path,
) -> None:
    path, body = REQUESTS[0]
    async with (
        mortal_scheduler(tmp_path, drain_timeout_s=3600) as first,
        gateway_process(first.address) as gateway,
    ):
        await gateway.wait_ready()
        first.watch.hold(after=5)
        asking = asyncio.create_task(ask(gateway, path, body))
        await first.watch.wait_held()
        first.scheduler.terminate()
        await gateway.wait_ready(503)
        refused = await gateway.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        first.watch.release()
        # What it had has come to its end.
        answer = await asking
        await first.wait_gone()

        await first.start()
        await gateway.wait_ready()
        assert await ask(gateway, path, body) == answer
